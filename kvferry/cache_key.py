"""Who may share KV with whom: the extra key of a request, and its wish to share at all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from kvferry.ids import NO_ADAPTER, AdapterId, ExtraKey


class Sharing(Enum):
    """What a request has to do with the prefix index."""

    SHARED = "shared"
    """Matches and publishes."""
    RECOMPUTED = "recomputed"
    """Matches nothing, because every token's logits are needed (prompt logprobs); publishes."""
    PRIVATE = "private"
    """Neither: its KV does not follow from its tokens alone (overridden positions)."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How one request uses the prefix indexes it meets. Travels with it to every worker."""

    extra_key: ExtraKey
    sharing: Sharing = Sharing.SHARED
    priority: int = 0
    """What it publishes is kept longer, the higher; under the eviction policy `priority` only."""
    adapter: AdapterId = NO_ADAPTER
    """What its KV is computed with; part of `extra_key`, too, from which nobody reads it."""


def build_extra_key(model: str, adapter: AdapterId = NO_ADAPTER, salt: str = "") -> ExtraKey:
    """The part of a prefix's key that is not tokens. Different inputs give different keys.

    `model` tells the weights and what they are computed in (see `weights_identity`), `adapter` a
    LoRA adapter by its files, `salt` the tenant's or the request's secret: whoever does not know it
    can neither share nor probe.
    """
    # JSON, because joining names by any separator would let one name contain it.
    return ExtraKey(json.dumps([model, adapter, salt], ensure_ascii=False, separators=(",", ":")))
