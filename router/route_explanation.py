"""Why a route was taken: the parts of what it would cost, beside those of the next best.

Nothing is predicted here. All figures are columns of the `router.policy.Weighing` that the route
was chosen by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from router.route_costs import AFTER_MS, MOVING_MS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvferry.ids import WorkerId
    from router.policy import Route, Weighing


@dataclass(frozen=True, slots=True)
class Candidate:
    """A route that was taken, or could have been."""

    computing: WorkerId
    decode: WorkerId
    held_tokens: int
    """Leading prompt tokens that the computing worker holds, or will hold after its queue..."""
    decode_held_tokens: int
    """...and those that the decode worker holds."""
    queue_ms: float
    prefill_ms: float
    """What the computing worker lacks of the prompt."""
    copies_ms: float | None
    """What copies of prefixes count beside their time; negative if they are worth more than it.
    None: the policy does not count in time."""
    handoff_ms: float
    decode_ms: float
    cost: float
    """By what it was compared with the others beside it; the least is taken."""

    @property
    def total_ms(self) -> float:
        """All parts together."""
        before_ms = self.queue_ms + self.prefill_ms + (self.copies_ms or 0.0)
        return before_ms + self.handoff_ms + self.decode_ms


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why this route: what was taken comes first, then the others, cheapest first."""

    prompt_tokens: int
    is_time: bool
    """The policy counts in milliseconds: the cost of a candidate is the sum of its parts."""
    computing: tuple[Candidate, ...]
    """By who computes the prompt, each with the best that may decode it."""
    decoding: tuple[Candidate, ...]
    """By who decodes what the chosen one computes; none where that decodes it itself."""


def explain(weighing: Weighing, route: Route, others: int = 5) -> Explanation:
    """Of `route`, which came of `weighing`, and so many others of either side."""
    rows = _Rows(weighing, route)
    return Explanation(
        prompt_tokens=weighing.demand.prompt_tokens,
        is_time=weighing.placement.policy.is_time,
        computing=tuple(rows.computing(others)),
        decoding=tuple(rows.decoding(others)) if route.prefill is not None else (),
    )


class _Rows:
    """Columns of a weighing, worker by worker."""

    def __init__(self, weighing: Weighing, route: Route) -> None:
        self._weighing = weighing
        self._prefill_ms = weighing.pool.ttft_ms(weighing.placement.prompt)
        self._after_ms = weighing.predictions[AFTER_MS]
        infos = weighing.sides.workers.roster.infos
        self._source, self._decoder = infos.index(route.computing), infos.index(route.decode)

    def computing(self, others: int) -> Iterator[Candidate]:
        """The chosen one, and the others with the least costs."""
        costs, (_, start, local, stop) = self._weighing.costs, self._weighing.sides
        decoder = self._decoder
        if self._source >= local and stop < self._after_ms.size:
            decoder = stop + int(self._after_ms[stop:].argmin())
        for source in _ranked(costs, self._source - start, others):
            decodes = start + source if start + source >= local else decoder
            yield self._candidate(source, decodes, float(costs[source]))

    def decoding(self, others: int) -> Iterator[Candidate]:
        """The chosen pair, and the chosen source with the others of least time after it."""
        start, stop = self._weighing.sides.start, self._weighing.sides.stop
        source, after_ms = self._source - start, self._after_ms
        before = float(self._weighing.policy_costs[source])
        if not self._weighing.placement.policy.is_time:
            before = 0.0
        for position in _ranked(after_ms[stop:], self._decoder - stop, others):
            decoder = stop + position
            yield self._candidate(source, decoder, before + float(after_ms[decoder]))

    def _candidate(self, source: int, decoder: int, cost: float) -> Candidate:
        sides, predictions, pool, policy_costs = self._weighing[:4]
        infos, computed = sides.workers.roster.infos, sides.start + source
        ttft_ms, queue_ms = float(self._prefill_ms[source]), float(pool.queue_ms[source])
        moving_ms = 0.0 if decoder == computed else float(predictions[MOVING_MS, decoder])
        is_time = self._weighing.placement.policy.is_time
        return Candidate(
            computing=infos[computed].worker_id,
            decode=infos[decoder].worker_id,
            held_tokens=int(pool.hit_tokens[source]),
            decode_held_tokens=int(sides.workers.hit_tokens[decoder]),
            queue_ms=queue_ms,
            prefill_ms=ttft_ms - queue_ms,
            copies_ms=float(policy_costs[source]) - ttft_ms if is_time else None,
            handoff_ms=moving_ms,
            decode_ms=float(self._after_ms[decoder]) - moving_ms,
            cost=cost,
        )


def _ranked(costs: NDArray[np.float64], chosen: int, others: int) -> list[int]:
    """The chosen position, and the least of the others in order."""
    order = np.argsort(costs, kind="stable").tolist()
    return [chosen, *(each for each in order if each != chosen)][: others + 1]
