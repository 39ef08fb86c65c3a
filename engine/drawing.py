"""Drawing a token from each row of scores: temperature, top-k, top-p (of what top-k left), min-p.

A row's token is a function of its scores, its parameters and its uniform alone, bit by bit: rows do
not take part in one another's sums, and sums have the same order in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.ranking import most_likely

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvferry.sampling import SamplingParams

_NUCLEUS_CANDIDATES = 512
"""Most likely tokens looked at first for top-p; more where their probability does not reach it."""
_CANDIDATES_FACTOR = 8
_BLOCK = 256
"""Tokens whose weights are summed before they are searched."""


def draw(
    scores: NDArray[np.float32], params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> NDArray[np.int64]:
    """Token ids [S] from scores [S, V]; `uniforms` in [0, 1), one per row."""
    temperatures = np.asarray([one.temperature for one in params], dtype=np.float32)
    scaled = scores / temperatures[:, None]
    numbers = np.asarray(uniforms)
    ranked = np.asarray([_needs_ranking(one, scores.shape[1]) for one in params])
    chosen = np.empty(len(params), dtype=np.int64)
    for group, draw_group in ((ranked, _draw_ranked), (~ranked, _draw_unranked)):
        at = np.flatnonzero(group)
        if len(at):
            own = scaled if len(at) == len(params) else scaled[at]
            chosen[at] = draw_group(own, [params[row] for row in at.tolist()], numbers[at])
    return chosen


def _needs_ranking(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1.0


def weights_of(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """[S, V]: what is as likely as the best token of its row has 1."""
    weights: NDArray[np.float32] = scores - scores.max(axis=1, keepdims=True)
    np.exp(weights, out=weights)
    return weights


def block_sums(weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """[S, ceil(V / 256)]: of each 256 of weights [S, V]; in float32 their sum would be coarse."""
    starts = np.arange(0, weights.shape[1], _BLOCK)
    return np.add.reduceat(weights, starts, axis=1).astype(np.float64)


# --- over the whole vocabulary ----------------------------------------------------------------


def _draw_unranked(
    scores: NDArray[np.float32], params: list[SamplingParams], uniforms: NDArray[np.float64]
) -> NDArray[np.int64]:
    """In the order of ids: nothing has to be sorted. First the block is found, then the token."""
    weights = weights_of(scores)
    if any(one.min_p for one in params):
        weights *= weights >= np.asarray([one.min_p for one in params], dtype=np.float32)[:, None]
    vocab_size, rows = scores.shape[1], np.arange(len(scores))
    sums = block_sums(weights)
    reached = sums.cumsum(axis=1)
    target = _targets(reached, uniforms)
    block = _first_above(reached, target)
    rest = target - np.where(block > 0, reached[rows, block - 1], 0.0)
    ids = block[:, None] * _BLOCK + np.arange(_BLOCK)
    within = weights[rows[:, None], np.minimum(ids, vocab_size - 1)] * (ids < vocab_size)
    reached = within.astype(np.float64).cumsum(axis=1)
    # Rounding may leave more than the block has.
    found = _first_above(reached, np.minimum(rest, _targets(reached, np.ones(len(rows)))))
    ids_found: NDArray[np.int64] = np.minimum(block * _BLOCK + found, vocab_size - 1)
    return ids_found


# --- over the most likely tokens --------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows to be drawn from, of S each. Weights are relative to that of the best token."""

    scores: NDArray[np.float32]
    """[S, V]."""
    limits: NDArray[np.int64]
    """How many tokens top-k keeps; V: all."""
    totals: NDArray[np.float64]
    """Weight of the vocabulary; of no interest where top-k cuts it."""
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    uniforms: NDArray[np.float64]

    def at(self, rows: NDArray[np.int64]) -> _Rows:
        """Some of them."""
        return _Rows(
            self.scores[rows],
            self.limits[rows],
            self.totals[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.uniforms[rows],
        )


def _draw_ranked(
    scores: NDArray[np.float32], params: list[SamplingParams], uniforms: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Best first; where the first candidates do not reach top-p, of more and more."""
    vocab_size = scores.shape[1]
    limits = np.asarray([min(one.top_k or vocab_size, vocab_size) for one in params])
    is_cut = limits < vocab_size
    totals = np.zeros(len(params))
    if not is_cut.all():
        whole = scores if not is_cut.any() else scores[~is_cut]
        totals[~is_cut] = block_sums(weights_of(whole)).sum(axis=1)
    top_p = np.asarray([one.top_p for one in params])
    min_p = np.asarray([one.min_p for one in params])
    rows = _Rows(scores, limits, totals, top_p, min_p, uniforms)
    count = int(np.where(is_cut, limits, _NUCLEUS_CANDIDATES).max())
    chosen, is_enough = _draw_of_best(rows, count)
    while not is_enough.all():
        left, count = np.flatnonzero(~is_enough), count * _CANDIDATES_FACTOR
        chosen[left], is_enough[left] = _draw_of_best(rows.at(left), count)
    return chosen


def _draw_of_best(rows: _Rows, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Token ids [S] from the `count` best of each row, and where these were enough."""
    vocab_size = rows.scores.shape[1]
    best, ids = most_likely(rows.scores, count)
    if best.shape[1] == 0:
        # No row has any number: any id is as good, none must crash.
        return np.zeros(len(best), dtype=np.int64), np.ones(len(best), dtype=np.bool_)
    weights = np.exp(best.astype(np.float64) - best[:, :1])
    weights *= np.arange(best.shape[1]) < rows.limits[:, None]
    reached = weights.cumsum(axis=1)
    is_cut = rows.limits < vocab_size
    # What top-k keeps is the distribution that top-p looks at.
    bound = rows.top_p * np.where(is_cut, reached[:, -1], rows.totals)
    is_enough = is_cut | (reached[:, -1] >= bound) | (count >= vocab_size)
    weights *= reached - weights < bound[:, None]
    weights *= weights >= rows.min_p[:, None]
    reached = weights.cumsum(axis=1)
    picked = _first_above(reached, _targets(reached, rows.uniforms))
    return np.take_along_axis(ids, picked[:, None], axis=1)[:, 0], is_enough


# --- inversion --------------------------------------------------------------------------------


def _targets(reached: NDArray[np.float64], uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    """[S]. A uniform below 1 times the sum may round up to the sum, where no weight is left."""
    totals = reached[:, -1]
    return np.minimum(uniforms * totals, np.nextafter(totals, 0.0))


def _first_above(reached: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.int64]:
    """Index [S] of the first of ascending [S, n] above its target; the last one if none is, which
    only those that are no numbers come to."""
    passed = (reached <= targets[:, None]).sum(axis=1)
    first: NDArray[np.int64] = np.minimum(passed, reached.shape[1] - 1)
    return first
