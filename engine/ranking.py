"""The most likely tokens of each row of scores, without sorting the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GROUP_MAX = 64
"""Tokens per group. Of the larger groups there are fewer, but each lets more tokens pass."""
_LEAST = np.finfo(np.float32).min


def most_likely(
    scores: NDArray[np.float32], count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The `count` >= 1 highest of scores [S, V] and their ids, both [S, n], n <= count; best first,
    of equal ones the lowest id.

    What is -inf or no number is not among them: places for which nothing is left hold -inf and
    id 0.
    """
    num_rows, vocab_size = scores.shape
    at = np.flatnonzero(scores >= _bound(scores, min(count, vocab_size)))
    rows, ids = np.divmod(at, vocab_size)
    found = np.bincount(rows, minlength=num_rows)
    places = np.arange(len(at)) - np.repeat(np.cumsum(found) - found, found)
    shape = num_rows, int(found.max())
    best = np.full(shape, -np.inf, dtype=np.float32)
    best_ids = np.zeros(shape, dtype=np.int64)
    best[rows, places] = scores[rows, ids]
    best_ids[rows, places] = ids
    # Stable: each row has its ids in order.
    order = np.argsort(-best, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(best, order, axis=1), np.take_along_axis(best_ids, order, axis=1)


def _bound(scores: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """[S, 1]: at least `count` scores of a row reach it, if so many are above -inf; few do more.

    Groups have their maxima: where `count` of these reach a bound, so many scores do.
    """
    num_rows, vocab_size = scores.shape
    size = max(1, min(_GROUP_MAX, 2 * vocab_size // (3 * count)))
    groups = vocab_size // size
    # The groups are interleaved, so that the maxima of all are found together.
    maxima = scores[:, : groups * size].reshape(num_rows, size, groups).max(axis=1)
    bound = np.partition(maxima, groups - count, axis=1)[:, groups - count, None]
    return np.maximum(bound, _LEAST)
