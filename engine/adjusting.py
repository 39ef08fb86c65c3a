"""The stage that makes scores of logits: bias, penalties, and what may not be chosen."""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.native_math import F32, I32, Task, inlined, task
from engine.native_memory import array_at
from engine.sampling_item import (
    ADDED,
    ADDED_IDS,
    ADDENDS,
    FREQUENCY,
    GROUPS,
    LOGITS,
    MASK,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    SCORES,
    SEEN,
    SEEN_LEN,
    VOCAB_SIZE,
    WORDS,
)
from engine.score_vectors import keep_allowed, spread
from engine.scratch import give_back, take


@inlined
def _penalize_seen(seen: I32, penalty: np.float32, scores: F32, counts: I32) -> None:
    for at in range(len(seen)):
        counts[seen[at]] = 0
    for at in range(len(seen)):
        token = seen[at]
        # Once, however often it occurs.
        if counts[token] == 0:
            counts[token] = 1
            score = scores[token]
            scores[token] = score / penalty if score > 0 else score * penalty


@inlined
def _penalize_output(
    seen: I32, start: int, presence: float, frequency: float, scores: F32, counts: I32
) -> None:
    """Of what was seen, that from `start` on."""
    for at in range(start, len(seen)):
        counts[seen[at]] = 0
    for at in range(start, len(seen)):
        counts[seen[at]] += 1
    for at in range(start, len(seen)):
        token = seen[at]
        if counts[token] > 0:
            scores[token] -= np.float32(presence + frequency * counts[token])
            counts[token] = 0


@cache
def adjusting() -> Task:
    """Scores of an item. Addends first, then penalties, then the mask."""

    @task
    def adjust(item: int, _: int) -> int:
        words, numbers = array_at(item, WORDS, np.int64), array_at(item, WORDS, np.float64)
        vocab_size, scores_at = words[VOCAB_SIZE], words[SCORES]
        spread(words[LOGITS], vocab_size, scores_at)
        scores = array_at(scores_at, vocab_size, np.float32)
        added_ids = array_at(words[ADDED_IDS], words[ADDED], np.int32)
        addends = array_at(words[ADDENDS], words[ADDED], np.float32)
        for at in range(words[ADDED]):
            scores[added_ids[at]] += addends[at]
        if words[SEEN_LEN] > 0:
            seen, counts_at = array_at(words[SEEN], words[SEEN_LEN], np.int32), take(4 * vocab_size)
            counts = array_at(counts_at, vocab_size, np.int32)
            _penalize_seen(seen, np.float32(numbers[REPETITION]), scores, counts)
            presence, frequency = numbers[PRESENCE], numbers[FREQUENCY]
            _penalize_output(seen, words[PROMPT_LEN], presence, frequency, scores, counts)
            give_back(counts_at)
        if words[MASK] != 0:
            keep_allowed(scores_at, words[GROUPS], words[MASK])
        return 0

    return adjust
