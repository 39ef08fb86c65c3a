"""The default: predicted time of this request, and what its placement costs the others. Pure.

    cost = queue + (prompt that nobody holds + copies x their price) / rate

A worker that lacks a part of the prompt which others hold would compute a further *copy* of it:
work that others wait for, in pages that others lose, and which those who come later may use. By
this alone it differs from the least TTFT, which counts a copy like any other work.

* **Deserved.** A prefix deserves as many copies as its requests keep busy: their rate since it is
  known, times the work that each of them has beside the prefix. Of the copies beyond these,
  `1 - (deserved / copies) ** SURPLUS_EXPONENT` are of no use; as long as copies are missing, a
  further one counts less than its time.
* **Price.** What is of no use hurts as far as workers are busy, and large work more than in
  proportion, for all who come meanwhile wait; it is counted in typical prompts.
* **Eviction.** Pages hurt as far as prompts find that what they ask for was evicted everywhere.
* **Paid for.** What each copy was used so far is what a further one may expect; the more it is,
  the less a copy counts.

docs/router-policies.md has the reasons and the figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from router.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from router.policies.pool import PoolView, Prompt

WORK_PRICE = 3.3
"""Milliseconds that others lose by a millisecond of useless work while all workers are busy."""
SIZE_PRICE = 1.3
"""More for each typical prompt that could be computed in the time."""
EVICTION_PRICE = 300.0
"""Milliseconds that others lose by the pages of a millisecond of work, if all that prompts ask for
was evicted before."""
SURPLUS_EXPONENT = 1.0 / 3.0
SHORTAGE_EXPONENT = 0.5
"""A missing copy counts by `(copies / deserved) ** SHORTAGE_EXPONENT`."""
USES_UNPROVEN = 1.75
"""So many requests of a prefix are no sign of more to come."""
BUSY_SHARE = 0.35
"""Of a copy's time its requests may take, before it deserves another one."""
PROMPT_TOKENS = 40
"""Work of every prompt beside its tokens, in tokens."""
PAID_FACTOR, PAID_EXPONENT = 0.02, 1.5
"""A copy counts less by `1 + PAID_FACTOR * uses per copy ** PAID_EXPONENT`."""
COUNTED_MIN = 0.25
"""Whatever it is worth, a copy counts by this much of its time: that is taken now."""
AGE_MIN_MS = 1.0
"""Of a prefix whose first requests came at the same time."""


def priced_time(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """Predicted TTFT in milliseconds plus the price of the copies."""
    costs = pool.ttft_ms(prompt)
    _add_prices(pool, prompt, costs)
    return costs


def copies_price_ms(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """What the copies that each worker would compute cost beside their time; negative if they
    are worth more than that. Shape [workers]."""
    prices = np.zeros(pool.workers)
    _add_prices(pool, prompt, prices)
    return prices


def _add_prices(pool: PoolView, prompt: Prompt, costs: NDArray[np.float64]) -> None:
    heat = pool.heat
    if heat.level_tokens.size:
        _add_prices_ms(
            (pool.queue_ms, pool.tokens_per_ms, heat.level_requests, heat.level_seconds),
            pool.hit_tokens,
            heat.level_tokens,
            (float(prompt.tokens), pool.lost_share, pool.typical_tokens),
            costs,
        )


@compiled("void(UniTuple(float64[:], 4), int64[:], int64[:], UniTuple(float64, 3), float64[::1])")
def _add_prices_ms(
    columns: tuple[NDArray[np.float64], ...],
    hit_tokens: NDArray[np.int64],
    ends: NDArray[np.int64],
    terms: tuple[float, float, float],
    costs: NDArray[np.float64],
) -> None:
    """`columns` are the queues and rates of workers, and requests and seconds of the lengths `ends`
    that workers hold: they part the prompt, and every worker holds so many of the parts, from the
    first one on. `terms` are the tokens of the prompt, the lost share, and typical tokens."""
    queue_ms, tokens_per_ms, requests, seconds = columns
    prompt_tokens, lost_share, typical_tokens = terms
    waiting, rates = 0, 0.0
    for worker in range(queue_ms.size):
        waiting += queue_ms[worker] != 0.0
        rates += tokens_per_ms[worker]
    busy = waiting / queue_ms.size
    price = busy * WORK_PRICE + EVICTION_PRICE * lost_share
    size_price = busy * SIZE_PRICE / max(typical_tokens, 1.0)
    own_tokens = prompt_tokens - ends[-1] + PROMPT_TOKENS
    own_ms = own_tokens / (rates / queue_ms.size)
    # Of what is computed by who holds so many parts: useless tokens, what is counted of these, and
    # by how much all that is counted exceeds its tokens.
    useless = np.zeros(ends.size + 1)
    counted_useless = np.zeros(ends.size + 1)
    excess = np.zeros(ends.size + 1)
    for part in range(ends.size - 1, -1, -1):
        copies = 0
        for tokens in hit_tokens:
            copies += tokens >= ends[part]
        uses = max(requests[part] - USES_UNPROVEN, 0.0)
        age_ms = max(1000.0 * seconds[part], AGE_MIN_MS)
        supply = uses / age_ms * own_ms / BUSY_SHARE / copies
        surplus = max(1.0 - supply**SURPLUS_EXPONENT, 0.0)
        missing = max(supply, 1.0) ** SHORTAGE_EXPONENT
        paid = 1.0 + PAID_FACTOR * (uses / copies) ** PAID_EXPONENT
        size = ends[part] - (ends[part - 1] if part else 0)
        counted = size * max(1.0 / (missing * paid), COUNTED_MIN)
        useless[part] = useless[part + 1] + size * surplus
        counted_useless[part] = counted_useless[part + 1] + counted * surplus
        excess[part] = excess[part + 1] + counted - size
    for worker in range(hit_tokens.size):
        held = 0
        while held < ends.size and hit_tokens[worker] >= ends[held]:
            held += 1
        priced = (price + size_price * useless[held]) * counted_useless[held]
        costs[worker] += (excess[held] + priced) / tokens_per_ms[worker]
