"""One request at one worker, as `engine.request` is for the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mem_cache.request_kv import RequestKV
    from simulator.attempt import Attempt


@dataclass(slots=True, eq=False)
class HeldRequest:
    """What a worker knows and holds of a request. Tokens, where not said otherwise."""

    attempt: Attempt
    arrival: int
    """Its place in the order of arrival, over all workers."""
    ids: NDArray[np.int32]
    """Of the full pages of what is known, and one more, which nobody reads."""
    known: int
    """Prompt, and what of the answer was there before: its KV is computed, or comes."""
    longest: int
    """Whose KV it can come to hold."""
    promise: int
    """Pages that it may count on."""
    is_for_other: bool = False
    """Its prompt is computed for another worker."""
    computed: int = 0
    hit: int = 0
    """Of these, found in the cache."""
    kv: RequestKV | None = None
    left: int = 0
    """Pages promised and not taken."""
    is_inbound: bool = False
    was_retracted: bool = False
    joined: int = 0
    """Steps of its worker when it began to decode..."""
    ends: int = 0
    """...and when it has decoded all."""
    page_due: int = 0
    """The step that needs another page."""

    @property
    def uncomputed(self) -> int:
        """Of what is known."""
        return self.known - self.computed

    @property
    def held_kv(self) -> RequestKV:
        """Its KV, which it must have."""
        assert self.kv is not None, "it holds no KV"
        return self.kv
