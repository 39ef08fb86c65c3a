"""The stages that weigh the scores of a row and find the best one, and that draw a token of all.

A row's token is a function of its scores, its parameters and its uniform alone, bit by bit: no row
takes part in another's sums, and sums have the same order in every batch.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.native_math import F32, Task, inlined, task
from engine.native_memory import array_at, word_at
from engine.sampling_item import (
    BEST,
    CHOSEN,
    FACTOR,
    GROUPS,
    LEAST,
    MASK,
    MAXIMA,
    REACHED,
    SCORES,
    UNIFORM,
    VOCAB_SIZE,
    WORDS,
)
from engine.score_vectors import (
    GROUP,
    add_weights,
    find_allowed_maxima,
    find_maxima,
    lowest_bit,
    reaching,
    weigh_group,
)
from engine.scratch import give_back, take


@inlined
def _allowed_in(bits: int, group: int) -> int:
    """One bit for each token of a group that may be chosen."""
    return word_at(bits + 8 * group) if bits != 0 else -1


@inlined
def _first_best(scores: int, groups: int, bits: int, maxima: F32, best: np.float32) -> int:
    """The token with the highest score; of equal ones the first. Where none has a number, the
    first that may be chosen."""
    token, other = -1, -1
    group = 0
    while token < 0 and group < groups:
        allowed = _allowed_in(bits, group)
        if maxima[group] == best:
            left = reaching(scores + 4 * GROUP * group, best) & allowed
            if left != 0:
                token = GROUP * group + lowest_bit(left)
        if other < 0 and allowed != 0:
            other = GROUP * group + lowest_bit(allowed)
        group += 1
    return token if token >= 0 else other


@cache
def weighing() -> Task:
    """The maxima of an item's groups, the best token, and, if wanted, the sums of weights."""

    @task
    def weigh(item: int, _: int) -> int:
        words, numbers = array_at(item, WORDS, np.int64), array_at(item, WORDS, np.float64)
        scores, groups = words[SCORES], words[GROUPS]
        if words[MASK] != 0:
            # Nothing may have been made -inf of the scores yet.
            best = find_allowed_maxima(scores, groups, words[MASK], words[MAXIMA])
        else:
            best = find_maxima(scores, groups, words[MAXIMA])
        padded = (groups + GROUP - 1) // GROUP * GROUP
        maxima = array_at(words[MAXIMA], padded, np.float32)
        for group in range(groups, padded):
            maxima[group] = -np.inf
        numbers[BEST] = best
        token = _first_best(scores, groups, words[MASK], maxima, best)
        # Behind the last one there is -inf, which may be the best.
        words[CHOSEN] = token if token < words[VOCAB_SIZE] else 0
        if words[REACHED] != 0:
            factor, least = np.float32(numbers[FACTOR]), np.float32(numbers[LEAST])
            add_weights(scores, groups, best, factor, least, words[REACHED])
        return 0

    return weigh


@cache
def drawing() -> Task:
    """A token of all that have a weight, in the order of ids: nothing has to be sorted. The best
    one where that is no finite number."""

    @task
    def draw(item: int, _: int) -> int:
        words, numbers = array_at(item, WORDS, np.int64), array_at(item, WORDS, np.float64)
        if not np.isfinite(numbers[BEST]):
            return 0
        groups = words[GROUPS]
        reached = array_at(words[REACHED], groups, np.float64)
        target = numbers[UNIFORM] * reached[groups - 1]
        # First the group is found, then the token.
        group = 0
        while group + 1 < groups and reached[group] <= target:
            group += 1
        if group > 0:
            target -= reached[group - 1]
        memory = take(4 * GROUP)
        best, factor = np.float32(numbers[BEST]), np.float32(numbers[FACTOR])
        place = words[SCORES] + 4 * GROUP * group
        weigh_group(place, best, factor, np.float32(numbers[LEAST]), memory)
        weights = array_at(memory, GROUP, np.float32)
        total, found = 0.0, 0
        for at in range(GROUP):
            # Rounding may leave none above the target: then it is the last one with a weight.
            if weights[at] > 0 and total <= target:
                found = at
                total += weights[at]
        words[CHOSEN] = GROUP * group + found
        give_back(memory)
        return 0

    return draw
