"""What the prefix index tells routers: block hashes stored and removed, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.kv_events import (
    BLOCK_DIGEST_BYTES,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    unpack_hashes,
)
from kvferry.limits import KV_EVENTS_BUFFERED_MAX

if TYPE_CHECKING:
    from kvferry.kv_events import KvEvent


class BlockLog:
    """Events since they were last taken. Neighbours of one kind become one event.

    Holds at most `blocks_max` blocks, whether or not anybody takes them. Beyond that it forgets
    them all: who asks then tells what the index holds instead.
    """

    def __init__(self, blocks_max: int = KV_EVENTS_BUFFERED_MAX) -> None:
        self._runs: list[tuple[bool, list[bytes]]] = []
        self._cleared = False
        self._blocks_max = blocks_max
        self._blocks = 0
        self._overflowed = False

    def stored(self, digests: bytes) -> None:
        """The index now holds these blocks, given by their digests, one after the other."""
        self._append(True, digests)

    def removed(self, digests: bytes) -> None:
        """The index no longer holds these blocks."""
        self._append(False, digests)

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
        for is_stored, digests in self._runs:
            kind = BlocksStored if is_stored else BlocksRemoved
            events.append(kind(tuple(unpack_hashes(b"".join(digests)))))
        self._forget()
        return events

    def _forget(self) -> None:
        self._runs.clear()
        self._blocks = 0
        self._cleared = self._overflowed = False

    def _append(self, is_stored: bool, digests: bytes) -> None:
        if not digests or self._overflowed:
            return
        self._blocks += len(digests) // BLOCK_DIGEST_BYTES
        if self._blocks > self._blocks_max:
            self._forget()
            self._overflowed = True
            return
        if not self._runs or self._runs[-1][0] != is_stored:
            self._runs.append((is_stored, []))
        self._runs[-1][1].append(digests)
