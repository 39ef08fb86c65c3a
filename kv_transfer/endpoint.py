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


@dataclass(slots=True)
class Endpoint:
    """A worker as its handoffs see it."""

    hello: Hello
    kv_cache: KVCache
    config: HandoffConfig
    clock: Clock
    deadlines: Deadlines
    counters: Counter[str] = field(default_factory=Counter)
    """What happened, counted since the start. Names are in `docs/handoff.md`."""
    trace: Callable[[str, HandoffKey, str], None] | None = None
    """Told of every state that a handoff enters, the first one included, before the effects of
    the change: "source" or "sink", key, the value of the state."""
