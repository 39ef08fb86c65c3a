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
    levels = pool.heat.level_tokens
    if not levels.size:
        return np.zeros(pool.workers)
    # The lengths that workers hold part the prompt; each holds as many parts, from the first on.
    held = levels.searchsorted(pool.hit_tokens, side="right")
    wasted = np.array(_wasted_tokens(pool, np.bincount(held, minlength=levels.size + 1)))[held]
    typical = np.maximum(wasted, 0.0) / max(pool.typical_tokens, 1.0)
    per_token = (WORK_PRICE + SIZE_PRICE * typical) / pool.tokens_per_ms
    return np.asarray(per_token * wasted, dtype=np.float64)


def _wasted_tokens(pool: PoolView, workers: NDArray[np.int64]) -> list[float]:
    """By the parts that a worker holds, what it would compute of no use; one entry more than
    parts. `workers` says how many hold just so many parts."""
    ends, uses = pool.heat.level_tokens.tolist(), pool.heat.level_requests.tolist()
    wasted = [0.0] * (len(ends) + 1)
    copies = 0
    for part in range(len(ends) - 1, -1, -1):
        copies += int(workers[part + 1])
        tokens = ends[part] - (ends[part - 1] if part else 0)
        wasted[part] = wasted[part + 1] + tokens * _waste(pool, uses[part], copies)
    return wasted


def _waste(pool: PoolView, uses: float, copies: int) -> float:
    """Of a part of the prompt, the share of a further copy that nobody has any use of."""
    # As many as it surely had: a count of n is known to about the root of n.
    sure = max(uses - DOUBT * math.sqrt(uses), 0.0)
    share = sure / max(pool.heat.requests, 1.0)
    deserved = min(share * pool.workers, sure / USES_PER_COPY)
    waste = 1.0 - math.pow(deserved / copies, EXPONENT)
    paid = 1.0 + uses / copies / USES_PAID
    return waste / paid if waste > 0.0 else max(waste, -DISCOUNT / WORK_PRICE)
