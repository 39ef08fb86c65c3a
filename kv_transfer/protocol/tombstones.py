"""Handoffs that have ended: what swallows late and doubled messages."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from kvferry.limits import HANDOFF_TOMBSTONES_MAX

if TYPE_CHECKING:
    from kv_transfer.protocol.key import HandoffKey

Outcome = TypeVar("Outcome")


class Tombstones(Generic[Outcome]):
    """The outcome of each of the last `capacity` ended handoffs."""

    def __init__(self, capacity: int = HANDOFF_TOMBSTONES_MAX) -> None:
        self._capacity = capacity
        self._outcomes: OrderedDict[HandoffKey, Outcome] = OrderedDict()

    def bury(self, key: HandoffKey, outcome: Outcome) -> None:
        """Remember how `key` ended. A handoff ends once."""
        assert key not in self._outcomes, f"{key} ended twice"
        self._outcomes[key] = outcome
        if len(self._outcomes) > self._capacity:
            self._outcomes.popitem(last=False)

    def outcome(self, key: HandoffKey) -> Outcome | None:
        """How `key` ended; None if it has not, or so long ago that it is forgotten."""
        return self._outcomes.get(key)

    def __contains__(self, key: HandoffKey) -> bool:
        return key in self._outcomes

    def __len__(self) -> int:
        return len(self._outcomes)
