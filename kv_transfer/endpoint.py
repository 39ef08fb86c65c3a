"""What both sides of a worker's handoffs share on the engine thread."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.protocol.deadlines import Deadlines
    from kv_transfer.protocol.key import HandoffKey
    from kv_transfer.protocol.messages import Hello
    from kvferry.clock import Clock
    from kvferry.config import HandoffConfig
    from mem_cache.kv_cache import KVCache
    from mem_cache.kv_pool import KvPool


@dataclass(slots=True)
class Endpoint:
    """A worker as its handoffs see it."""

    hello: Hello
    kv_cache: KVCache
    pools: tuple[KvPool, ...]
    """One per tensor-parallel rank, each with its share of the heads of every slot."""
    config: HandoffConfig
    clock: Clock
    deadlines: Deadlines
    trace: Callable[[str, HandoffKey, str], None] | None = None
    """Told every change of state: side, key, new state."""
    counters: Counter[str] = field(default_factory=Counter)
    """What happened, counted since the start. Names are in `docs/handoff.md`."""

    def tell(self, side: str, key: HandoffKey, state: str) -> None:
        """Trace, if anyone wants it."""
        if self.trace is not None:
            self.trace(side, key, state)
