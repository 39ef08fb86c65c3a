"""Who asks for more than its share of what there is. Pure; the time is told.

What a request asks for is its *turn*: for how long it would take all that the workers can do. A
tenant's demand is the turns of the requests it sent of late, refused ones among them, per second:
a share of the whole fleet, above 1 where it asks for more than all of it. While the demands
together are below 1 nobody crowds. Above it, room is shared as fair queues share it (max-min
fairness): tenants that ask for less than the *level* get all they ask for, the others get the
level, which is such that all is given out; and those *crowd*.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

_LATE_S = 3.0
"""What was asked for so long ago counts 1/e: a flood of three times the capacity crowds within two
seconds."""
_LATE_TURNS = 8.0
"""The same in usual turns, where these are longer: a single request is no flood."""
_USUAL_WEIGHT = 0.2
"""Of the latest request in the mean of turns."""
_OVER_SHARE, _OVER_MAX = 0.5, 0.15
"""Who is above the level by less than this part of it, or of the fleet, may only have sent a few
requests together."""
_FEW_TENANTS = 32
_KEPT_S = 0.05
"""Where there are more tenants, who crowds is not found anew for so long: each is looked at."""


@dataclass(slots=True)
class _Demand:
    """`share` as it was at `age`, in units of what counts as late."""

    share: float
    age: float

    def at(self, age: float) -> float:
        return self.share * math.exp(self.age - age)

    def add(self, share: float, age: float) -> None:
        self.share = self.at(age) + share
        self.age = age


class DemandBook:
    """What every tenant asked for of late. Times are in seconds and never go back."""

    def __init__(self) -> None:
        self._of: dict[str, _Demand] = {}
        self._total = _Demand(0.0, 0.0)
        self._usual_turn_s: float | None = None
        self._late_s = _LATE_S
        self._age, self._age_at = 0.0, 0.0
        """Time in units of what counted as late while it went by, so that all shares fade alike."""
        self._crowding: frozenset[str] = frozenset()
        self._found_at = -math.inf
        self._is_stale = True

    def asked(self, tenant: str, turn_s: float | None, now: float) -> None:
        """A request that would take the whole fleet for `turn_s`; None: unknown, taken as usual."""
        age = self._age_of(now)
        if turn_s is None:
            turn_s = self._usual_turn_s or 0.0
        usual_s = turn_s if self._usual_turn_s is None else self._usual_turn_s
        self._usual_turn_s = usual_s + _USUAL_WEIGHT * (turn_s - usual_s)
        self._age, self._age_at = age, now
        self._late_s = max(_LATE_S, _LATE_TURNS * self._usual_turn_s)
        for each in (self._total, self._of.setdefault(tenant, _Demand(0.0, age))):
            each.add(turn_s / self._late_s, age)
        self._is_stale = True

    def crowding(self, now: float) -> frozenset[str]:
        """Tenants that ask for more than their share; nobody while there is enough for all."""
        age = self._age_of(now)
        if self._total.at(age) <= 1.0:
            self._crowding, self._is_stale = frozenset(), True
        elif self._is_stale and (len(self._of) <= _FEW_TENANTS or now - self._found_at >= _KEPT_S):
            shares = {name: demand.at(age) for name, demand in self._of.items()}
            level = level_of(sorted(shares.values()))
            least = level + min(_OVER_SHARE * level, _OVER_MAX)
            self._crowding = frozenset(name for name, share in shares.items() if share > least)
            self._found_at, self._is_stale = now, False
        return self._crowding

    def is_modest(self, tenant: str, now: float) -> bool:
        """Whether a tenant asks for no more than its share while another one crowds."""
        crowding = self.crowding(now)
        return bool(crowding) and tenant not in crowding

    def forget(self, tenant: str) -> None:
        """Nothing of this tenant was asked for of late."""
        self._of.pop(tenant, None)

    def _age_of(self, now: float) -> float:
        return self._age + (now - self._age_at) / self._late_s


def level_of(shares: list[float]) -> float:
    """The share that nobody has to go short of, of `shares` in rising order: infinite where they
    are no more than 1 together. They are filled like vessels, the smallest first."""
    left = 1.0
    for count, share in zip(itertools.count(len(shares), -1), shares, strict=False):
        if share * count > left:
            return left / count
        left -= share
    return math.inf
