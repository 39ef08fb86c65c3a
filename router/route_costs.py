"""What is predicted of every worker at once: compiled loops over the loads.

The columns of `counts` and `rates` are those of `router.load.Loads`. In milliseconds, except where
said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from router.compiled import compiled, inlined
from router.load import (
    JOINED,
    LINK_RATE,
    PREFILL_RATE,
    PREFILL_TOKENS,
    SEQUENCES,
    SLOTS_AVAILABLE,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOKENS_PER_MS, QUEUE_MS, SINCE, AFTER_MS, MOVING_MS = 0, 1, 2, 3, 4
"""Rows of what is predicted. Of those that may compute the prompt: tokens that each computes per
millisecond; how long what it has will take it; and since when, in seconds, what it was sent counts.
Of all: how long it takes to complete the answer once the prompt is computed. Of those that decode
what others compute: the part of it that the handoff takes."""
PREDICTIONS = 5


@inlined
def _decode_ms(
    counts: NDArray[np.int64],
    worker: int,
    missing: int,
    answer: tuple[int, int, int],
    step: tuple[float, float],
) -> np.float64:
    """A step takes `step[0]` and `step[1]` more for each sequence beside it; where there is no
    place or no slots left, others have to end before.

    `missing` are the prompt tokens that it lacks; `answer` are the steps of the answer, those
    expected of others, and the places of a worker.
    """
    steps, steps_of_others, places = answer
    sequences = counts[worker, SEQUENCES]
    rounds_before = sequences // places
    if rounds_before == 0 and counts[worker, SLOTS_AVAILABLE] < missing + steps:
        rounds_before = 1
    step_ms = step[0] + min(sequences, places - 1) * step[1]
    found: np.float64 = step_ms * (steps + rounds_before * steps_of_others)
    return found


@inlined
def _usual(rates: NDArray[np.float64], column: int, otherwise: float) -> np.float64:
    """The rate of who has none yet: the mean of those that were measured. If it were taken for much
    slower than it is, it would be given nothing, and never be measured."""
    measured, total = 0, 0.0
    for worker in range(rates.shape[0]):
        measured += rates[worker, column] > 0.0
        total += rates[worker, column]
    usual: np.float64 = np.float64(total / measured if measured else otherwise)
    return usual


@compiled(
    "void(Tuple((int64[:, ::1], float64[:, ::1])), int64[::1], UniTuple(int64, 3),"
    " UniTuple(int64, 5), UniTuple(float64, 4), UniTuple(float64, 3), float64[:, ::1])"
)
def predict(
    loads: tuple[NDArray[np.int64], NDArray[np.float64]],
    hit_tokens: NDArray[np.int64],
    parts: tuple[int, int, int],
    numbers: tuple[int, int, int, int, int],
    usual: tuple[float, float, float, float],
    times_s: tuple[float, float, float],
    found: NDArray[np.float64],
) -> None:
    """Fill the rows of `found`; [`PREDICTIONS`, workers].

    The workers from `parts[0]` to `parts[1]` compute for those from `parts[2]` on, the ones between
    decode what they compute. `numbers` are the tokens of the prompt, the bytes of one, steps of the
    answer, those expected of others, and the places of a worker. `usual` are the rates where nobody
    has one yet, the time of a step alone, and what each sequence beside it adds. `times_s` are now,
    how long what was sent counts at a worker that has nothing to compute, and at others; what was
    sent before it joined was sent to another process of its name.
    """
    counts, rates = loads
    start, local, stop = parts
    prompt_tokens, bytes_per_token, steps, steps_of_others, places = numbers
    answer = (steps, steps_of_others, places)
    usual_prefill, usual_link, step_alone_ms, step_beside_ms = usual
    usual_prefill = _usual(rates, PREFILL_RATE, usual_prefill)
    usual_link = _usual(rates, LINK_RATE, usual_link)
    step = (step_alone_ms, step_beside_ms)
    now, idle_s, busy_s = times_s
    for worker in range(start, stop):
        queued = counts[worker, PREFILL_TOKENS]
        tokens_per_ms = (rates[worker, PREFILL_RATE] or usual_prefill) / 1000.0
        found[TOKENS_PER_MS, worker] = tokens_per_ms
        found[QUEUE_MS, worker] = queued / tokens_per_ms
        since = now - (busy_s if queued else idle_s)
        found[SINCE, worker] = max(since, rates[worker, JOINED])
    for worker in range(local, stop):
        missing = prompt_tokens - hit_tokens[worker]
        found[AFTER_MS, worker] = _decode_ms(counts, worker, missing, answer, step)
    least = np.inf
    for worker in range(stop, hit_tokens.size):
        missing = prompt_tokens - hit_tokens[worker]
        moved = max(0, missing) * bytes_per_token
        moving_ms = 1000.0 * moved / (rates[worker, LINK_RATE] or usual_link)
        after_ms = moving_ms + _decode_ms(counts, worker, missing, answer, step)
        found[AFTER_MS, worker], found[MOVING_MS, worker] = after_ms, moving_ms
        least = min(least, after_ms)
    for worker in range(start, local):
        found[AFTER_MS, worker] = least


@compiled("int64(float64[:], float64, float64)")
def cheapest(costs: NDArray[np.float64], tie: float, draw: float) -> int:
    """Position of the least cost; of those that differ from it by no more than `tie`, the one that
    `draw` says, from 0 to less than 1."""
    least = costs[0]
    for cost in costs:
        least = min(least, cost)
    equals = 0
    for cost in costs:
        equals += cost <= least + tie
    left = int(draw * equals)
    position = 0
    while left > 0 or costs[position] > least + tie:
        left -= costs[position] <= least + tie
        position += 1
    return position


@compiled("int64(boolean[::1], int64[::1], int64, int64, int64)")
def count_alone(
    computes: NDArray[np.bool_],
    hit_tokens: NDArray[np.int64],
    first: int,
    prompt_tokens: int,
    local_tokens_max: int,
) -> int:
    """How many of the workers from `first` on compute this prompt by themselves: as they always do,
    or because no more than `local_tokens_max` of it are missing."""
    alone = 0
    for worker in range(first, hit_tokens.size):
        missing = max(prompt_tokens - hit_tokens[worker], 1)
        alone += computes[worker] or missing <= local_tokens_max
    return alone
