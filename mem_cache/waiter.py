"""A request that KV is copied for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.ids import TokenIds
    from mem_cache.request_kv import RequestKV


@dataclass(frozen=True, slots=True)
class Waiter:
    """Who waits for a copy, with the tokens it wants."""

    kv: RequestKV
    token_ids: TokenIds
