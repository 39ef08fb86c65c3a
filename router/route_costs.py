"""What is predicted of every worker at once: compiled loops over the columns of its load.

The rows of `counts` and `rates` are those of `router.load.Loads`. In milliseconds, except where
said; every result is [workers].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from router.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

PREFILL_TOKENS, _SEQUENCES, _SLOTS_AVAILABLE = 0, 1, 4
PREFILL_RATE, _LINK_RATE, _JOINED = 0, 1, 2


@compiled("float64[::1](int64[:, :], int64[:], int64, UniTuple(int64, 3), UniTuple(float64, 2))")
def decode_ms(
    counts: NDArray[np.int64],
    hit_tokens: NDArray[np.int64],
    prompt_tokens: int,
    numbers: tuple[int, int, int],
    step: tuple[float, float],
) -> NDArray[np.float64]:
    """Until an answer is complete. A step takes `step[0]` and `step[1]` more for each sequence
    beside it; where there is no place or no slots left, others have to end before.

    `numbers` are the steps of the answer, those expected of others, and the places of a worker.
    """
    steps, steps_of_others, places = numbers
    found = np.empty(hit_tokens.size, dtype=np.float64)
    for worker in range(hit_tokens.size):
        sequences = counts[_SEQUENCES, worker]
        needed = prompt_tokens - hit_tokens[worker] + steps
        rounds_before = sequences // places
        if rounds_before == 0 and counts[_SLOTS_AVAILABLE, worker] < needed:
            rounds_before = 1
        step_ms = step[0] + min(sequences, places - 1) * step[1]
        found[worker] = step_ms * (steps + rounds_before * steps_of_others)
    return found


@compiled("float64[::1](float64[:, :], int64[:], int64, int64, float64)")
def handoff_ms(
    rates: NDArray[np.float64],
    hit_tokens: NDArray[np.int64],
    prompt_tokens: int,
    bytes_per_token: int,
    usual_rate: float,
) -> NDArray[np.float64]:
    """Until what a decode worker lacks of the KV has come."""
    found = np.empty(hit_tokens.size, dtype=np.float64)
    for worker in range(hit_tokens.size):
        rate = rates[_LINK_RATE, worker] or usual_rate
        moved = max(0, prompt_tokens - hit_tokens[worker]) * bytes_per_token
        found[worker] = 1000.0 * moved / rate
    return found


@compiled("UniTuple(float64[::1], 3)(int64[:, :], float64[:, :], float64, UniTuple(float64, 3))")
def queues(
    counts: NDArray[np.int64],
    rates: NDArray[np.float64],
    usual_rate: float,
    times_s: tuple[float, float, float],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Tokens that a worker computes per millisecond; how long what it has will take it; and since
    when in seconds what it was sent counts. `times_s` are now, how long that is for a worker that
    has nothing to compute, and for others. What was sent before a worker joined was sent to
    another process of its name."""
    now, idle_s, busy_s = times_s
    workers = rates.shape[1]
    tokens_per_ms, queue_ms, since = np.empty(workers), np.empty(workers), np.empty(workers)
    for worker in range(workers):
        queued = counts[PREFILL_TOKENS, worker]
        tokens_per_ms[worker] = (rates[PREFILL_RATE, worker] or usual_rate) / 1000.0
        queue_ms[worker] = queued / tokens_per_ms[worker]
        since[worker] = max(now - (busy_s if queued else idle_s), rates[_JOINED, worker])
    return tokens_per_ms, queue_ms, since


@compiled("int64[::1](float64[:], float64)")
def cheapest(costs: NDArray[np.float64], tie: float) -> NDArray[np.int64]:
    """Positions of the least cost, and of those that differ from it by no more than `tie`."""
    least = costs[0]
    for cost in costs:
        least = min(least, cost)
    found = np.empty(costs.size, dtype=np.int64)
    count = 0
    for position in range(costs.size):
        if costs[position] <= least + tie:
            found[count] = position
            count += 1
    return found[:count].copy()


@compiled("UniTuple(int64[::1], 2)(boolean[:], int64[:], int64, int64)")
def alone_and_others(
    computes: NDArray[np.bool_],
    hit_tokens: NDArray[np.int64],
    prompt_tokens: int,
    local_tokens_max: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of those that compute this prompt by themselves, as they always do or because no
    more than `local_tokens_max` of it are missing; and of all others."""
    alone = np.empty(hit_tokens.size, dtype=np.int64)
    others = np.empty(hit_tokens.size, dtype=np.int64)
    count = 0
    for worker in range(hit_tokens.size):
        missing = max(prompt_tokens - hit_tokens[worker], 1)
        if computes[worker] or missing <= local_tokens_max:
            alone[count] = worker
            count += 1
        else:
            others[worker - count] = worker
    return alone[:count].copy(), others[: hit_tokens.size - count].copy()
