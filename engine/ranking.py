"""The stage that finds the most likely tokens, without sorting the vocabulary, and draws of them.

Groups of 64 tokens have their maxima: where k of these reach a bound, k tokens do, and not many
more. Only what reaches it is sorted. What is no number is never among the most likely.
"""

from __future__ import annotations

from functools import cache
from math import exp
from typing import Any

import numpy as np

from engine.native_math import F32, I64, Task, inlined, task
from engine.native_memory import array_at
from engine.sampling_item import (
    BEST,
    CHOSEN,
    COUNT,
    FACTOR,
    FOUND,
    GROUPS,
    IDS,
    MAXIMA,
    MIN_P,
    RANKED,
    REACHED,
    SCORES,
    TOLD,
    TOLD_LEN,
    TOP_P,
    UNIFORM,
    VOCAB_SIZE,
    WORDS,
)
from engine.score_vectors import GROUP, count_reaching, lowest_bit, reaching
from engine.scratch import give_back, take

_FIRST_COUNT = 64
"""Most likely tokens looked at first for top-p; more where their probability does not reach it."""
_COUNT_FACTOR = 8

_SIGN = -(2**31)
_LEAST_KEY = -int(np.finfo(np.float32).max.view(np.int32))
"""Of the lowest number above -inf."""
_MAX_KEY = 2**31 - 1
_ID_BITS = 31
_ID_MASK = 2**_ID_BITS - 1
_DIGIT_BITS = 8
_DIGITS = 2**_DIGIT_BITS


# --- keys: whole numbers in the order of the scores; 0 and -0 are equal ------------------------


@inlined
def _key(score: np.float32) -> Any:
    bits = np.int64(np.float32(score).view(np.int32))
    return bits if bits >= 0 else _SIGN - bits


@inlined
def _number(key: int) -> Any:
    """What has this key."""
    bits = key if key >= 0 else _SIGN - key
    return np.int32(bits).view(np.float32)


# --- items: a score and a token as one number; the best is the least ---------------------------


@inlined
def _weight(item: int, best: float, factor: float) -> Any:
    """Of the best token 1."""
    score = _number(_MAX_KEY - (item >> _ID_BITS))
    return exp((np.float64(score) - best) * factor)


@inlined
def _bound(scores: int, groups: int, count: int, best: np.float32) -> Any:
    """What at least `count` scores reach, if so many are above -inf, and hardly more than twice as
    many do."""
    # As many reach `low` as have to, or all do; fewer reach `high`.
    low, high = _LEAST_KEY, _key(best) + 1
    while high - low > 1:
        middle = (low + high) // 2
        found = count_reaching(scores, groups, _number(middle))
        if found < count:
            high = middle
        else:
            low = middle
            if found <= 2 * count:
                break
    return _number(low)


@inlined
def _count(scores: int, maxima: F32, bound: np.float32) -> int:
    """How many of all scores reach the bound: only groups whose maximum does are looked at."""
    count = 0
    for group in range(len(maxima)):
        if maxima[group] >= bound:
            count += count_reaching(scores + 4 * GROUP * group, 1, bound)
    return count


@inlined
def _collect(scores: int, maxima: F32, bound: np.float32, items: I64) -> None:
    """Items of all that reaches the bound, in the order of ids."""
    at = 0
    for group in range(len(maxima)):
        if maxima[group] >= bound:
            place = scores + 4 * GROUP * group
            own = array_at(place, GROUP, np.float32)
            left = reaching(place, bound)
            while left != 0:
                lane = lowest_bit(left)
                left &= left - 1
                key = _MAX_KEY - _key(own[lane])
                items[at] = (key << _ID_BITS) | (GROUP * group + lane)
                at += 1


@inlined
def _sum_of(items: I64, best: float, factor: float) -> float:
    total = 0.0
    for at in range(len(items)):
        total += _weight(items[at], best, factor)
    return total


@inlined
def _sort(items_at: int, spare_at: int, count: int) -> None:
    """By digits of the score, the lowest first; what is equal keeps its order."""
    ends_at = take(8 * _DIGITS)
    ends = array_at(ends_at, _DIGITS, np.int64)
    for shift in range(_ID_BITS, _ID_BITS + 32, _DIGIT_BITS):
        items, spare = array_at(items_at, count, np.int64), array_at(spare_at, count, np.int64)
        for digit in range(_DIGITS):
            ends[digit] = 0
        for at in range(count):
            ends[(items[at] >> shift) & (_DIGITS - 1)] += 1
        end = np.int64(0)
        for digit in range(_DIGITS):
            own = ends[digit]
            ends[digit] = end
            end += own
        for at in range(count):
            digit = (items[at] >> shift) & (_DIGITS - 1)
            spare[ends[digit]] = items[at]
            ends[digit] += 1
        items_at, spare_at = spare_at, items_at
    give_back(ends_at)


@cache
def ranking() -> Task:
    """The stage that finds the most likely tokens; `telling` or `picking` has to follow."""

    @task
    def rank(item: int, _: int) -> int:
        words, numbers = array_at(item, WORDS, np.int64), array_at(item, WORDS, np.float64)
        scores, groups, wanted = words[SCORES], words[GROUPS], words[COUNT]
        best, factor = numbers[BEST], numbers[FACTOR]
        words[FOUND] = 0
        if not np.isfinite(best):
            return 0
        maxima = array_at(words[MAXIMA], groups, np.float32)
        count = wanted if wanted > 0 else _FIRST_COUNT
        while True:
            few = 2 * count <= groups
            of = words[MAXIMA] if few else scores
            in_groups = (groups + GROUP - 1) // GROUP if few else groups
            bound = _bound(of, in_groups, count, np.float32(best))
            found = _count(scores, maxima, bound)
            memory = take(16 * found)
            items = array_at(memory, found, np.int64)
            _collect(scores, maxima, bound, items)
            if wanted > 0 or count >= words[VOCAB_SIZE]:
                break
            reached = array_at(words[REACHED], groups, np.float64)
            if _sum_of(items, best, factor) >= numbers[TOP_P] * reached[groups - 1]:
                break
            give_back(memory)
            count *= _COUNT_FACTOR
        _sort(memory, memory + 8 * found, found)
        words[RANKED] = memory
        words[FOUND] = found
        return 0

    return rank


@cache
def telling() -> Task:
    """The stage that tells the most likely tokens and their scores."""

    @task
    def tell(item: int, _: int) -> int:
        words = array_at(item, WORDS, np.int64)
        count = min(words[COUNT], words[FOUND])
        words[TOLD_LEN] = count
        if count > 0:
            items = array_at(words[RANKED], count, np.int64)
            ids = array_at(words[IDS], count, np.int64)
            told = array_at(words[TOLD], count, np.float64)
            for at in range(count):
                ids[at] = items[at] & _ID_MASK
                told[at] = _number(_MAX_KEY - (items[at] >> _ID_BITS))
            give_back(words[RANKED])
        return 0

    return tell


@cache
def picking() -> Task:
    """The stage that draws one of the most likely tokens, best first: of as many as reach top-p,
    none below min-p, one at least. The best one where that is no finite number."""

    @task
    def pick(item: int, _: int) -> int:
        words, numbers = array_at(item, WORDS, np.int64), array_at(item, WORDS, np.float64)
        best, factor, found = numbers[BEST], numbers[FACTOR], words[FOUND]
        if found == 0:
            return 0
        count = min(words[COUNT], found) if words[COUNT] > 0 else found
        items = array_at(words[RANKED], count, np.int64)
        if words[COUNT] > 0:
            # What top-k keeps is the distribution that top-p looks at.
            bound = numbers[TOP_P] * _sum_of(items, best, factor)
        else:
            groups = words[GROUPS]
            bound = numbers[TOP_P] * array_at(words[REACHED], groups, np.float64)[groups - 1]
        weights = array_at(words[RANKED] + 8 * found, count, np.float64)
        reached, stop = 0.0, 0
        while stop < count:
            weights[stop] = _weight(items[stop], best, factor)
            if stop > 0 and (reached >= bound or weights[stop] < numbers[MIN_P]):
                break
            reached += weights[stop]
            stop += 1
        target, reached, at = numbers[UNIFORM] * reached, weights[0], 0
        while at + 1 < stop and reached <= target:
            at += 1
            reached += weights[at]
        words[CHOSEN] = items[at] & _ID_MASK
        give_back(words[RANKED])
        return 0

    return pick
