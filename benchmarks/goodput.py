"""Goodput: most prompt tokens/s and worker that may be offered with the p90 of TTFT within a limit.

Loads are rungs of a ladder, each 1 % above the one before and the same for every policy, so that
policies are compared at equal loads. TTFT does not always rise with the load: another load orders
arrivals differently, and with few prefixes much hangs on where the first of each one goes. So the
search does not end at the first rung that fails, but where none of those holds that are 1, 2, 4
and so on up to 64 above the one that does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.replay import Replay

if TYPE_CHECKING:
    from benchmarks.replay import ReplaySettings, Workload
    from router.policies.catalogue import Policy

TTFT_SHARE = 0.9
LADDER_STEP = 1.01
"""Goodput is found to this factor."""
LADDER_LOAD = 0.5
"""Of rung 0."""
LOWEST_RUNG, HIGHEST_RUNG = -320, 370
"""Loads of .02 and 20: with the latter a closed loop has all its sessions at once."""
_STEPS = (64, 32, 16, 8, 4, 2, 1)
"""Between rungs that are tried."""


def load_of(rung: int) -> float:
    """Of a perfect cache; see `benchmarks.replay`."""
    return LADDER_LOAD * LADDER_STEP**rung


def rung_near(load: float) -> int:
    """The rung whose load is the nearest."""
    rung = round(math.log(load / LADDER_LOAD, LADDER_STEP))
    return min(max(rung, LOWEST_RUNG), HIGHEST_RUNG)


@dataclass(frozen=True, slots=True)
class GoodputSearch:
    """Of one policy on one trace."""

    workload: Workload
    policy: Policy
    settings: ReplaySettings
    limit_s: float

    def holds(self, rung: int) -> bool:
        """Whether the limit is held at that load."""
        settings = replace(self.settings, load=load_of(rung))
        return Replay(self.workload, self.policy, settings).holds(TTFT_SHARE, self.limit_s)

    def highest(self) -> int | None:
        """The highest rung that holds, sought from the load of the settings on; None: none does."""
        rung, step = rung_near(self.settings.load), 1
        while not self.holds(rung):
            if rung == LOWEST_RUNG:
                return None
            rung, step = max(rung - step, LOWEST_RUNG), 2 * step
        return self._climb(rung)

    def highest_beyond(self, best: int) -> int | None:
        """The highest rung that holds, above one that does for another policy, or the highest of
        all; None: none there does, and those below are not looked at."""
        if best == HIGHEST_RUNG:
            return best if self.holds(best) else None
        found = self._climb(best)
        return None if found == best else found

    def _climb(self, rung: int) -> int:
        """Up from `rung` by all steps, until none leads to a rung that holds."""
        before = None
        while rung != before:
            before = rung
            for step in _STEPS:
                while rung + step <= HIGHEST_RUNG and self.holds(rung + step):
                    rung += step
        return rung
