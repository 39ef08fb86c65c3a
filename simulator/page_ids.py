"""Ids of pages of tokens: what stands for tokens in simulated caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MIX = np.uint64(0x9E3779B97F4A7C15)
_ID_BITS = 30
"""Of an id of a page of a prompt; ids of pages of answers have a bit more."""
_ANSWER_BIT = 1 << _ID_BITS


def page_ids(blocks: NDArray[np.uint64], pages_per_block: int, salt: int) -> NDArray[np.int32]:
    """An id for each page of blocks whose names are unique in a trace; int32 [blocks * pages].

    Ids of 30 bits: two pages that follow the same prefix are taken for one in one case of 10^9.
    Different salts make different prompts of the same trace.
    """
    parts = np.arange(1, pages_per_block + 1, dtype=np.uint64)
    mixed = (blocks[:, None] + np.uint64(1)) * _MIX + parts + np.uint64(salt) * np.uint64(0xD1B54A3)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX
    return (mixed >> np.uint64(64 - _ID_BITS)).astype(np.int32).ravel()


class AnswerPages:
    """Ids for the pages that answers fill, which nobody asks for again."""

    def __init__(self) -> None:
        self._made = 0

    def take(self, count: int) -> NDArray[np.int32]:
        """As many as no answer has."""
        first = self._made % _ANSWER_BIT
        self._made += count
        ids = (first + np.arange(count, dtype=np.int64)) % _ANSWER_BIT + _ANSWER_BIT
        return ids.astype(np.int32)
