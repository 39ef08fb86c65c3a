"""An item of a step's sampling: a row of logits and what is done with it, as 64-bit words.

An item goes through up to four stages, each a `native_math.task` that gets the address of the
item's words. A stage is compiled when the first item needs it: greedy answers need none.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.crew import share
from engine.native_math import I64, Task, kernel, task
from engine.native_memory import address_of, array_at, call, keep

STAGES = 4
"""The first words: addresses of stages, 0 where there is none."""

(
    LOGITS,  # the address of float32 [V]
    VOCAB_SIZE,
    SCORES,  # of float32, whole groups; may be the logits themselves
    GROUPS,
    ADDED_IDS,  # of int32 [ADDED]
    ADDENDS,  # of float32 [ADDED]
    ADDED,
    SEEN,  # of int32 [SEEN_LEN]: prompt and answer, for penalties
    PROMPT_LEN,
    SEEN_LEN,
    MASK,  # of a 64-bit word for each group: what may be chosen, lowest bit first; 0: all may
    MAXIMA,  # of float32 [GROUPS], filled up to whole groups
    REACHED,  # of float64 [GROUPS], see `score_vectors.add_weights`; 0: not wanted
    COUNT,  # of most likely tokens that are looked at; 0: as many as top-p needs
    IDS,  # of int64 [COUNT]: the most likely tokens that are told
    TOLD,  # of float64 [COUNT]: their scores
    TOLD_LEN,  # how many there are: `COUNT`, if there are so many
    RANKED,  # of int64 [FOUND]: what `engine.ranking` has found
    FOUND,
    CHOSEN,  # the token: the best one, or the one that was drawn
    PLACES_END,
) = range(STAGES, STAGES + 21)
"""Whole numbers."""

(
    REPETITION,
    PRESENCE,
    FREQUENCY,
    FACTOR,  # 1 over the temperature
    LEAST,  # weight that counts, in sums over all tokens
    TOP_P,
    MIN_P,
    UNIFORM,  # in [0, 1)
    BEST,  # the highest score, when it is known
    WORDS,
) = range(PLACES_END, PLACES_END + 10)
"""float64; `WORDS` is how many words an item has."""


@cache
def item_part() -> Task:
    """The part of a shared work that is one item."""

    @task
    def part(arguments: int, index: int) -> int:
        given = array_at(arguments, 2, np.int64)
        item = given[0] + 8 * given[1] * index
        stages = array_at(item, STAGES, np.int64)
        for stage in range(STAGES):
            if stages[stage] != 0:
                call(stages[stage], item, 0)
        return 0

    return part


@kernel
def run_items(board: int, part: int, items: I64) -> None:
    """Have a crew run items [n, WORDS at least]. part: the address of `item_part`."""
    share(board, part, np.array([address_of(items), items.shape[1]]), len(items))
    keep(items)
