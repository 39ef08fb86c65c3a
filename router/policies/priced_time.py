"""The default: predicted time of this request, and what its placement costs the others. Pure.

    cost = queue + uncached / rate + price of the copies

A worker that lacks a prefix which others hold would compute a further *copy* of it: work that
others wait for, in pages that others lose. What a millisecond of that costs the others depends on
who will use the copy.

* A prefix deserves as many copies as its share of the requests times the workers, but not more
  than its uses so far can pay for: what is new may never come again.
* The more copies there are beside those deserved, the less of the next one is of use: of
  `1 - (deserved / copies) ** EXPONENT` nobody has any. It is negative as long as copies are
  missing: computing one is then an investment, not a waste.
* A waste that is used many times is paid for in the end: it counts less the more often each copy
  has been asked for.
* Large work hurts more than in proportion: whoever comes while it is computed waits or goes
  elsewhere. It is counted in typical requests.

docs/router-policies.md has the reasons and the figures.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from router.compiled import compiled, inlined

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from router.policies.pool import PoolView, Prompt

WORK_PRICE = 3.0
"""Milliseconds that others lose by a millisecond of work that nobody has any use of."""
DISCOUNT = 0.5
"""Of a copy that is missing, at most this part of its time is not counted against it."""
EXPONENT = 1.0 / 3.0
SIZE_PRICE = 0.6
"""More for each typical prompt that could be computed in the time."""
DOUBT = 0.7
"""How many times its root a count of requests is taken as less than it is."""
USES_PER_COPY = 1.0
"""Requests so far for each copy that a prefix deserves."""
USES_PAID = 20.0
"""Requests per copy that halve the price of a further one."""


def priced_time(pool: PoolView, prompt: Prompt) -> NDArray[np.float64]:
    """Predicted TTFT in milliseconds plus the price of the copies."""
    ttft_ms = pool.ttft_ms(prompt)
    ttft_ms += copies_price_ms(pool)
    return ttft_ms


def copies_price_ms(pool: PoolView) -> NDArray[np.float64]:
    """What the copies that each worker would compute cost the others; negative if they gain."""
    heat = pool.heat
    if not heat.level_tokens.size:
        return np.zeros(pool.workers)
    past = (float(heat.requests), float(pool.typical_tokens))
    numbers = (WORK_PRICE, DISCOUNT, EXPONENT, SIZE_PRICE, DOUBT, USES_PER_COPY, USES_PAID)
    columns = (pool.hit_tokens, pool.tokens_per_ms, heat.level_tokens, heat.level_requests)
    return _price_ms(*columns, past, numbers)


@inlined
def _waste(
    uses: float, requests: float, workers: int, copies: int, numbers: tuple[float, ...]
) -> float:
    """Of a part of the prompt, the share of a further copy that nobody has any use of."""
    work_price, discount, exponent, _, doubt, uses_per_copy, uses_paid = numbers
    # As many as it surely had: a count of n is known to about the root of n.
    sure = max(uses - doubt * math.sqrt(uses), 0.0)
    share = sure / max(requests, 1.0)
    deserved = min(share * workers, sure / uses_per_copy)
    waste = 1.0 - math.pow(deserved / copies, exponent)
    if waste > 0.0:
        return waste / (1.0 + uses / copies / uses_paid)
    return max(waste, -discount / work_price)


@compiled(
    "float64[::1](int64[:], float64[:], int64[:], float64[:], UniTuple(float64, 2),"
    " UniTuple(float64, 7))"
)
def _price_ms(
    hit_tokens: NDArray[np.int64],
    tokens_per_ms: NDArray[np.float64],
    ends: NDArray[np.int64],
    uses: NDArray[np.float64],
    past: tuple[float, float],
    numbers: tuple[float, ...],
) -> NDArray[np.float64]:
    """`ends` are the lengths that workers hold: they part the prompt, and every worker holds so
    many of the parts, from the first one on."""
    requests, typical_tokens = past
    # Of no use, of what is computed by who holds so many parts.
    wasted = np.zeros(ends.size + 1, dtype=np.float64)
    for part in range(ends.size - 1, -1, -1):
        copies = 0
        for tokens in hit_tokens:
            copies += tokens >= ends[part]
        size = ends[part] - (ends[part - 1] if part else 0)
        waste = _waste(uses[part], requests, hit_tokens.size, copies, numbers)
        wasted[part] = wasted[part + 1] + size * waste
    found = np.empty(hit_tokens.size, dtype=np.float64)
    for worker in range(hit_tokens.size):
        held = 0
        while held < ends.size and hit_tokens[worker] >= ends[held]:
            held += 1
        typical = max(wasted[held], 0.0) / max(typical_tokens, 1.0)
        per_token = (numbers[0] + numbers[3] * typical) / tokens_per_ms[worker]
        found[worker] = per_token * wasted[held]
    return found
