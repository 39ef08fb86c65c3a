"""What the prefix index tells routers: block hashes stored and removed, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from kvferry.limits import KV_EVENTS_BUFFERED_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.kv_events import BlockHash, KvEvent


class BlockLog:
    """Events since they were last taken. Neighbours of one kind become one event.

    Holds at most `blocks_max` blocks, whether or not anybody takes them. Beyond that it forgets
    them all: who asks then tells what the index holds instead.
    """

    def __init__(self, blocks_max: int = KV_EVENTS_BUFFERED_MAX) -> None:
        self._runs: list[tuple[bool, list[BlockHash]]] = []
        self._cleared = False
        self._blocks_max = blocks_max
        self._blocks = 0
        self._overflowed = False

    def stored(self, block_hashes: Sequence[BlockHash]) -> None:
        """The index now holds these blocks."""
        self._append(True, block_hashes)

    def removed(self, block_hashes: Sequence[BlockHash]) -> None:
        """The index no longer holds these blocks."""
        self._append(False, block_hashes)

    def cleared(self) -> None:
        """The index is empty; what was logged before no longer matters."""
        self._forget()
        self._cleared = True

    def take(self) -> list[KvEvent] | None:
        """The events since the last call, in order; None if there were too many to keep."""
        if self._overflowed:
            self._forget()
            return None
        events: list[KvEvent] = [AllBlocksCleared()] if self._cleared else []
        for is_stored, hashes in self._runs:
            kind = BlocksStored if is_stored else BlocksRemoved
            events.append(kind(tuple(hashes)))
        self._forget()
        return events

    def _forget(self) -> None:
        self._runs.clear()
        self._blocks = 0
        self._cleared = self._overflowed = False

    def _append(self, is_stored: bool, block_hashes: Sequence[BlockHash]) -> None:
        if not block_hashes or self._overflowed:
            return
        self._blocks += len(block_hashes)
        if self._blocks > self._blocks_max:
            self._forget()
            self._overflowed = True
            return
        if not self._runs or self._runs[-1][0] != is_stored:
            self._runs.append((is_stored, []))
        self._runs[-1][1].extend(block_hashes)
