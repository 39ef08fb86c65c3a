"""When the chains of an open loop begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.plan import Arrivals

if TYPE_CHECKING:
    from bench.plan import LoadPlan
    from bench.record import Floats

_ARRIVALS_SEED = 977
"""So that times and prompts are drawn apart."""


def arrival_times(load: LoadPlan, count: int, seed: int) -> Floats:
    """[count] seconds since the start, rising. All clients draw the same and take their own.

    Gaps have the mean 1 / rate: equal; exponential; or gamma of shape 1 / cv^2, whose coefficient
    of variation is `load.burstiness`.
    """
    draws = np.random.default_rng((seed, _ARRIVALS_SEED))
    mean_s = 1.0 / load.rate
    if load.arrivals is Arrivals.CONSTANT:
        return np.arange(count, dtype=np.float64) * mean_s
    if load.arrivals is Arrivals.POISSON:
        gaps = draws.exponential(mean_s, count)
    else:
        shape = 1.0 / load.burstiness**2
        gaps = draws.gamma(shape, mean_s / shape, count)
    times: Floats = np.cumsum(gaps)
    return times
