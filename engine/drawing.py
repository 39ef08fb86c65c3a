"""The stages that weigh the scores of a row, and that draw a token of all of them.

A row's token is a function of its scores, its parameters and its uniform alone, bit by bit: no row
takes part in another's sums, and sums have the same order in every batch.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.native_math import Task, task
from engine.native_memory import array_at
from engine.sampling_item import (
    BEST,
    FACTOR,
    GROUPS,
    IDS,
    LEAST,
    MAXIMA,
    REACHED,
    SCORES,
    UNIFORM,
    WORDS,
)
from engine.score_vectors import GROUP, add_weights, find_maxima, weigh_group
from engine.scratch import give_back, take


@cache
def weighing() -> Task:
    """The maxima of an item's groups, the highest score, and, if wanted, the sums of weights."""

    @task
    def weigh(item: int, _: int) -> int:
        words, numbers = array_at(item, WORDS, np.int64), array_at(item, WORDS, np.float64)
        scores, groups = words[SCORES], words[GROUPS]
        best = find_maxima(scores, groups, words[MAXIMA])
        padded = (groups + GROUP - 1) // GROUP * GROUP
        maxima = array_at(words[MAXIMA], padded, np.float32)
        for group in range(groups, padded):
            maxima[group] = -np.inf
        numbers[BEST] = best
        if words[REACHED] != 0:
            factor, least = np.float32(numbers[FACTOR]), np.float32(numbers[LEAST])
            add_weights(scores, groups, best, factor, least, words[REACHED])
        return 0

    return weigh


@cache
def drawing() -> Task:
    """A token of all that have a weight, in the order of ids: nothing has to be sorted."""

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
        array_at(words[IDS], 1, np.int64)[0] = GROUP * group + found
        give_back(memory)
        return 0

    return draw
