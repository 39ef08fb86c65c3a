"""Which workers serve a request. Pure.

A policy (`router.policies`) says what it costs to have each worker compute the prompt. What
follows is predicted here, in milliseconds until the answer is complete:

    prefill worker   (queued + own uncached prompt tokens) / its measured rate
    handoff          bytes the decode worker does not hold yet / its measured link rate
    decode worker    slow-down of each step by the sequences beside it, and a wait for an answer
                     to end when it has no place or no KV slots left

A policy that counts in milliseconds has both workers chosen jointly, by the least sum. Others
choose the computing worker, and the decode worker follows by the least time. What has not been
measured yet is taken for the mean of the other workers, and where none was, for the default of
`CostModel`. The prefill part depends on the computing worker alone and the rest on the decode
worker alone, so the best pair is found without trying every pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.errors import WorkerUnavailable
from kvferry.membership import Role
from router.load import ACTIVE_TOKENS, PREFILL_TOKENS, REQUESTS, SLOTS_TOTAL
from router.policies.history import PENDING_S
from router.policies.pool import NO_HEAT, PoolView
from router.route_costs import (
    AFTER_MS,
    PREDICTIONS,
    QUEUE_MS,
    SINCE,
    TOKENS_PER_MS,
    cheapest,
    count_alone,
    predict,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvferry.ids import WorkerId
    from kvferry.membership import WorkerInfo
    from router.load import Loads
    from router.policies.catalogue import Policy
    from router.policies.history import PlacementHistory
    from router.policies.pool import Prompt

_TIE_MS = 1e-6
"""Costs closer than this are equal: it absorbs rounding, nothing more."""

_EVENT_DELAY_S = 1.0
"""Of what a worker with nothing left to compute was sent before, events have told by now."""


@lru_cache(maxsize=4096)
def name_hash(worker_id: WorkerId) -> int:
    """64 bits, the same in every router."""
    return int.from_bytes(blake2b(worker_id.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """Some workers, in an order; what stays the same from request to request."""

    infos: tuple[WorkerInfo, ...]
    names: NDArray[np.uint64]
    """[workers]: `name_hash` of each."""
    computes: NDArray[np.bool_]
    """[workers]: whether it computes the prompts that it decodes: its role is `BOTH`."""

    @staticmethod
    def of(infos: Iterable[WorkerInfo]) -> Roster:
        """These workers in this order."""
        those = tuple(infos)
        return Roster(
            infos=those,
            names=np.array([name_hash(info.worker_id) for info in those], dtype=np.uint64),
            computes=np.array([info.role is Role.BOTH for info in those], dtype=np.bool_),
        )

    def __len__(self) -> int:
        """How many there are."""
        return len(self.infos)

    def take(self, positions: NDArray[np.intp]) -> Roster:
        """Those at these positions."""
        infos = tuple(self.infos[position] for position in positions.tolist())
        return Roster(infos, self.names[positions], self.computes[positions])

    def part(self, start: int, stop: int) -> Roster:
        """Those at the positions from `start` to `stop`."""
        return Roster(self.infos[start:stop], self.names[start:stop], self.computes[start:stop])


class WorkersView(NamedTuple):
    """Usable workers as the policy sees them, at one moment, for one prompt."""

    roster: Roster
    hit_tokens: NDArray[np.int64]
    """[workers]: leading prompt tokens in its radix cache; at least one is always computed."""
    loads: Loads
    """In the order of the roster."""

    def take(self, positions: NDArray[np.intp]) -> WorkersView:
        """Those at these positions."""
        loads = self.loads.take(positions)
        return WorkersView(self.roster.take(positions), self.hit_tokens[positions], loads)

    def part(self, start: int, stop: int) -> WorkersView:
        """Those at the positions from `start` to `stop`."""
        roster, loads = self.roster.part(start, stop), self.loads.part(start, stop)
        return WorkersView(roster, self.hit_tokens[start:stop], loads)


class ClusterView(NamedTuple):
    """The usable workers at one moment, for one prompt."""

    workers: WorkersView
    """Those that only compute, of role `PREFILL`, then those that decode."""
    prefillers: int
    """How many only compute."""

    @property
    def prefill(self) -> WorkersView:
        """Those that only compute."""
        return self.workers.part(0, self.prefillers)

    @property
    def decode(self) -> WorkersView:
        """Of role `DECODE` or `BOTH`."""
        return self.workers.part(self.prefillers, len(self.workers.roster))


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs."""

    prompt_tokens: int
    answer_tokens_max: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """What turns load into milliseconds. Defaults are of a small model on one CPU core."""

    kv_bytes_per_token: int
    running_max: int
    """Sequences a worker decodes together; more have to wait."""
    local_prefill_tokens_max: int = 0
    """A decode worker computes an uncached part up to this by itself."""
    prefill_tokens_per_s: float = 400.0
    link_bytes_per_s: float = 1e9
    decode_step_ms: float = 60.0
    """One decode step with one sequence..."""
    decode_step_ms_per_sequence: float = 4.0
    """...and what each further sequence adds to it."""
    answer_tokens_expected: int = 128
    """Answers are seldom as long as they may be."""


class Route(NamedTuple):
    """Where one attempt goes."""

    decode: WorkerInfo
    prefill: WorkerInfo | None
    """None: the decode worker computes the prompt itself."""
    prefill_tokens: int
    """Prompt tokens that the computing worker does not have."""
    cost_ms: float
    held_tokens: int = 0
    """The most that one of those who could compute the prompt holds of it, or was sent."""

    @property
    def computing(self) -> WorkerInfo:
        """The worker that computes the prompt."""
        return self.prefill or self.decode

    @property
    def workers(self) -> frozenset[WorkerId]:
        """Everyone who takes part."""
        return frozenset({self.decode.worker_id, self.computing.worker_id})


class Placement(NamedTuple):
    """By what the computing worker of a prompt is chosen."""

    policy: Policy
    prompt: Prompt
    history: PlacementHistory
    """Only read."""
    now: float


class Sides(NamedTuple):
    """Who may compute the prompt, and who may decode what another one computes: parts of all."""

    workers: WorkersView
    start: int
    """The first that may compute the prompt..."""
    local: int
    """...the first of those who would decode it too, and the end of those who would not..."""
    stop: int
    """...the end of those who may compute it, and the first of those who may decode what a worker
    computes that does not do so itself."""


class Weighing(NamedTuple):
    """What every worker would cost one prompt: all that a choice goes by, and the chosen follow."""

    sides: Sides
    predictions: NDArray[np.float64]
    """Rows as `router.route_costs` names them; [`PREDICTIONS`, workers]."""
    pool: PoolView
    """Those that may compute the prompt, from `sides.start` to `sides.stop`."""
    policy_costs: NDArray[np.float64]
    """[pool] what the policy says."""
    costs: NDArray[np.float64]
    """[pool] the least is taken: with what comes after the prompt, if the policy counts in time."""
    demand: Demand
    placement: Placement


def weigh(
    view: ClusterView,
    demand: Demand,
    model: CostModel,
    avoid: frozenset[WorkerId],
    placement: Placement,
) -> Weighing:
    """What the workers would cost; pure.

    Workers in `avoid` are weighed only where there is no other. Raises `WorkerUnavailable` when
    nobody can decode.
    """
    view = _without(view, avoid)
    if view.prefillers == len(view.workers.roster):
        raise WorkerUnavailable("no decode worker is reachable")
    sides = _sides_of(view, demand, model)
    predictions = _predictions(sides, demand, model, placement.now)
    pool = _pool_of(sides, predictions, placement)
    policy_costs = costs = placement.policy.costs(pool, placement.prompt)
    if placement.policy.is_time:
        costs = costs + predictions[AFTER_MS, sides.start : sides.stop]
    return Weighing(sides, predictions, pool, policy_costs, costs, demand, placement)


def cheapest_route(weighing: Weighing, rng: random.Random) -> Route:
    """The cheapest of what was weighed; equally cheap ones are drawn at random."""
    sides, predictions, pool, _, costs, demand, _ = weighing
    workers, start, local, stop = sides
    after = predictions[AFTER_MS]
    source = decoder = start + cheapest(costs, _TIE_MS, rng.random())
    if source < local:
        decoder = stop + cheapest(after[stop:], _TIE_MS, rng.random())
    infos, hits = workers.roster.infos, pool.hit_tokens
    uncached = max(1, demand.prompt_tokens - workers.hit_tokens.item(source))
    queued = workers.loads.counts.item(source, PREFILL_TOKENS)
    return Route(
        decode=infos[decoder],
        prefill=infos[source] if source < local else None,
        prefill_tokens=uncached,
        cost_ms=(queued + uncached) / predictions.item(TOKENS_PER_MS, source) + after.item(source),
        held_tokens=hits.item(hits.argmax()),
    )


def _sides_of(view: ClusterView, demand: Demand, model: CostModel) -> Sides:
    workers, first = view
    every = len(workers.roster)
    if not first:
        return Sides(workers, 0, 0, every)
    computes, hits = workers.roster.computes, workers.hit_tokens
    limit = model.local_prefill_tokens_max
    alone = count_alone(computes, hits, first, demand.prompt_tokens, limit)
    if alone == 0:
        return Sides(workers, 0, first, first)
    if alone == every - first:
        return Sides(workers, first, first, every)
    are_alone = computes | (np.maximum(demand.prompt_tokens - hits, 1) <= limit)
    rank = np.where(np.arange(every) < first, 0, 2 - are_alone)
    ordered = workers.take(np.argsort(rank, kind="stable"))
    return Sides(ordered, 0, first, first + alone)


def _predictions(sides: Sides, demand: Demand, model: CostModel, now: float) -> NDArray[np.float64]:
    """Rows as `router.route_costs` names them; [`PREDICTIONS`, workers]."""
    workers, start, local, stop = sides
    expected = model.answer_tokens_expected
    steps = min(demand.answer_tokens_max, expected)
    found = np.empty((PREDICTIONS, workers.hit_tokens.size), dtype=np.float64)
    predict(
        (workers.loads.counts, workers.loads.rates),
        workers.hit_tokens,
        (start, local, stop),
        (demand.prompt_tokens, model.kv_bytes_per_token, steps, expected, model.running_max),
        (
            model.prefill_tokens_per_s,
            model.link_bytes_per_s,
            model.decode_step_ms,
            model.decode_step_ms_per_sequence,
        ),
        (now, _EVENT_DELAY_S, PENDING_S),
        found,
    )
    return found


def _pool_of(sides: Sides, predictions: NDArray[np.float64], placement: Placement) -> PoolView:
    workers, start, _, stop = sides
    names, counts = workers.roster.names[start:stop], workers.loads.counts[start:stop]
    prompt, history = placement.prompt, placement.history
    # Sent and not computed yet: no event can tell of it, but the next prompt will find it there.
    hits = history.hits_with_pending(
        workers.hit_tokens[start:stop], names, prompt, predictions[SINCE, start:stop]
    )
    reads_sent, reads_heat = placement.policy.reads_sent, placement.policy.reads_heat
    return PoolView(
        names=names,
        hit_tokens=hits,
        queue_ms=predictions[QUEUE_MS, start:stop],
        tokens_per_ms=predictions[TOKENS_PER_MS, start:stop],
        requests=counts[:, REQUESTS],
        active_tokens=counts[:, ACTIVE_TOKENS],
        slots=counts[:, SLOTS_TOTAL],
        sent_tokens=history.sent_tokens(names.tolist(), prompt) if reads_sent else hits,
        turn=history.turn,
        typical_tokens=history.typical_tokens,
        lost_share=history.lost_share,
        heat=history.heat(prompt, hits, placement.now) if reads_heat else NO_HEAT,
    )


def _without(view: ClusterView, avoid: frozenset[WorkerId]) -> ClusterView:
    """Of those who only compute, and of those who decode, nobody in `avoid` unless all are."""
    if not avoid:
        return view
    workers, prefillers = view
    infos, every = workers.roster.infos, len(workers.roster)
    kept: list[int] = []
    for part in (range(prefillers), range(prefillers, every)):
        kept += [each for each in part if infos[each].worker_id not in avoid] or part
    positions = np.array(kept, dtype=np.intp)
    return ClusterView(workers.take(positions), int(np.count_nonzero(positions < prefillers)))
