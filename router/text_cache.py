"""Tokens of texts that were tokenized before, the least recently used ones forgotten first."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.ids import TokenIds

TEXT_CACHE_BYTES = 64 * 2**20
"""About 7 M tokens of English at 4 bytes of text and 4 of id each: a thousand long chats."""

_ENTRY_OVERHEAD_BYTES = 300
"""Of the array object, the links of the ordered dict and its table."""

_SHARE_OF_ONE_MAX = 16
"""A text that would take more than this part of the cache is not kept."""


class TextCache:
    """Token ids by text, bounded in bytes. Thread-safe."""

    def __init__(self, bytes_max: int = TEXT_CACHE_BYTES) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[str, TokenIds] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def bytes_held(self) -> int:
        """Of all entries, overhead included."""
        return self._bytes

    def get(self, text: str) -> TokenIds | None:
        """The ids, not to be written to; None for a text that is not known."""
        with self._lock:
            ids = self._entries.get(text)
            if ids is not None:
                self._entries.move_to_end(text)
            return ids

    def put(self, text: str, ids: TokenIds) -> None:
        """Remember, and forget others if need be."""
        size = _size(text, ids)
        if size * _SHARE_OF_ONE_MAX > self._bytes_max:
            return
        ids.flags.writeable = False
        with self._lock:
            if text in self._entries:
                return
            self._entries[text] = ids
            self._bytes += size
            while self._bytes > self._bytes_max:
                self._bytes -= _size(*self._entries.popitem(last=False))

    def check_invariants(self) -> None:
        """That the bytes are those of the entries."""
        with self._lock:
            assert self._bytes == sum(_size(*entry) for entry in self._entries.items())
            assert self._bytes <= self._bytes_max


def _size(text: str, ids: TokenIds) -> int:
    return sys.getsizeof(text) + int(ids.nbytes) + _ENTRY_OVERHEAD_BYTES
