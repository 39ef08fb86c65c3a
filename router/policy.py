"""Which workers serve a request. Pure.

A policy (`router.policies`) says what it costs to have each worker compute the prompt. What
follows is predicted here, in milliseconds until the answer is complete:

    prefill worker   (queued + own uncached prompt tokens) / its measured rate
    handoff          bytes the decode worker does not hold yet / its measured link rate
    decode worker    slow-down of each step by the sequences beside it, and a wait for an answer
                     to end when it has no place or no KV slots left

A policy that counts in milliseconds has both workers chosen jointly, by the least sum. Others
choose the computing worker, and the decode worker follows by the least time. What has not been
measured yet takes the defaults of `CostModel`. The prefill part depends on the computing worker
alone and the rest on the decode worker alone, so the best pair is found without trying every pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.errors import WorkerUnavailable
from kvferry.membership import Role
from router.load import NO_LOADS
from router.policies.history import PENDING_S
from router.policies.pool import NO_HEAT, PoolView
from router.route_costs import (
    PREFILL_RATE,
    PREFILL_TOKENS,
    alone_and_others,
    cheapest,
    decode_ms,
    handoff_ms,
    queues,
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

    def and_those(self, others: Roster) -> Roster:
        """These workers, then the others."""
        return Roster(
            self.infos + others.infos,
            np.concatenate((self.names, others.names)),
            np.concatenate((self.computes, others.computes)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class WorkersView:
    """Usable workers as the policy sees them, at one moment, for one prompt."""

    roster: Roster
    hit_tokens: NDArray[np.int64]
    """[workers]: leading prompt tokens in its radix cache; at least one is always computed."""
    loads: Loads
    """In the order of the roster."""

    def __len__(self) -> int:
        """How many workers there are."""
        return len(self.roster)

    def take(self, positions: NDArray[np.intp]) -> WorkersView:
        """Those at these positions."""
        loads = self.loads.take(positions)
        return WorkersView(self.roster.take(positions), self.hit_tokens[positions], loads)

    def and_those(self, others: WorkersView) -> WorkersView:
        """These workers, then the others."""
        return WorkersView(
            self.roster.and_those(others.roster),
            np.concatenate((self.hit_tokens, others.hit_tokens)),
            self.loads.and_those(others.loads),
        )


NO_WORKERS = WorkersView(Roster.of(()), np.empty(0, dtype=np.int64), NO_LOADS)


class ClusterView(NamedTuple):
    """The usable workers at one moment, for one prompt."""

    prefill: WorkersView
    decode: WorkersView
    """Of role `DECODE` or `BOTH`."""


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


class _Sides(NamedTuple):
    """Who may compute the prompt, and who may decode what another one computes."""

    computing: WorkersView
    """Prefill workers, then decode workers that compute for themselves."""
    prefillers: int
    """How many prefill workers these are."""
    local: WorkersView | None
    """Those decode workers; None for none."""
    partners: WorkersView | None
    """Decode workers whose prompts a prefill worker computes; None for none."""


def choose_route(
    view: ClusterView,
    demand: Demand,
    model: CostModel,
    avoid: frozenset[WorkerId],
    rng: random.Random,
    placement: Placement,
) -> Route:
    """The cheapest route; equally cheap ones are drawn at random.

    Workers in `avoid` are taken only where there is no other. Raises `WorkerUnavailable` when
    nobody can decode.
    """
    decoders = _without(view.decode, avoid)
    if not len(decoders):
        raise WorkerUnavailable("no decode worker is reachable")
    sides = _sides_of(_without(view.prefill, avoid), decoders, demand, model)
    computing, partners = sides.computing, sides.partners
    # What comes after the prompt is computed: shape [partners] and [computing].
    after = np.empty(len(computing), dtype=np.float64)
    if sides.local is not None:
        after[sides.prefillers :] = _decode_ms(sides.local, demand, model)
    ending = after[:0]
    if partners is not None:
        ending = _handoff_ms(partners, demand, model) + _decode_ms(partners, demand, model)
        after[: sides.prefillers] = ending.min()
    pool = _pool_of(computing, model, placement)
    costs = placement.policy.costs(pool, placement.prompt)
    position = _draw_cheapest(costs + after if placement.policy.is_time else costs, rng)
    source = decoder = computing.roster.infos[position]
    is_local = partners is None or position >= sides.prefillers
    if partners is not None and not is_local:
        decoder = partners.roster.infos[_draw_cheapest(ending, rng)]
    uncached = max(1, demand.prompt_tokens - computing.hit_tokens.item(position))
    return Route(
        decode=decoder,
        prefill=None if is_local else source,
        prefill_tokens=uncached,
        cost_ms=_prefill_ms(computing.loads, position, uncached, model) + after.item(position),
        held_tokens=int(pool.hit_tokens.max()),
    )


def _sides_of(
    prefillers: WorkersView, decoders: WorkersView, demand: Demand, model: CostModel
) -> _Sides:
    if not len(prefillers):
        return _Sides(decoders, 0, decoders, None)
    limit, roster = model.local_prefill_tokens_max, decoders.roster
    alone, others = alone_and_others(
        roster.computes, decoders.hit_tokens, demand.prompt_tokens, limit
    )
    if not alone.size:
        return _Sides(prefillers, len(prefillers), None, decoders)
    if alone.size == len(decoders):
        return _Sides(decoders, 0, decoders, None)
    partners, local = decoders.take(others), decoders.take(alone)
    return _Sides(prefillers.and_those(local), len(prefillers), local, partners)


def _pool_of(workers: WorkersView, model: CostModel, placement: Placement) -> PoolView:
    loads, names = workers.loads, workers.roster.names
    prompt, history = placement.prompt, placement.history
    times_s = (placement.now, _EVENT_DELAY_S, PENDING_S)
    tokens_per_ms, queue_ms, since = queues(
        loads.counts, loads.rates, model.prefill_tokens_per_s, times_s
    )
    # Sent and not computed yet: no event can tell of it, but the next prompt will find it there.
    pending = history.pending_tokens(names, prompt, since)
    hits = np.maximum(workers.hit_tokens, pending)
    reads_sent, reads_heat = placement.policy.reads_sent, placement.policy.reads_heat
    return PoolView(
        names=names,
        hit_tokens=hits,
        queue_ms=queue_ms,
        tokens_per_ms=tokens_per_ms,
        requests=loads.requests,
        active_tokens=loads.active_tokens,
        slots=loads.slots_total,
        sent_tokens=history.sent_tokens(names.tolist(), prompt) if reads_sent else hits,
        turn=history.turn,
        typical_tokens=history.typical_tokens,
        lost_share=history.lost_share,
        heat=history.heat(prompt, hits, placement.now) if reads_heat else NO_HEAT,
    )


def _without(workers: WorkersView, avoid: frozenset[WorkerId]) -> WorkersView:
    if not avoid:
        return workers
    infos = workers.roster.infos
    kept = [position for position, info in enumerate(infos) if info.worker_id not in avoid]
    return workers.take(np.array(kept, dtype=np.intp)) if kept else workers


def _prefill_ms(loads: Loads, position: int, uncached: int, model: CostModel) -> float:
    rate = loads.rates.item(PREFILL_RATE, position) or model.prefill_tokens_per_s
    return 1000.0 * (loads.counts.item(PREFILL_TOKENS, position) + uncached) / rate


def _handoff_ms(workers: WorkersView, demand: Demand, model: CostModel) -> NDArray[np.float64]:
    return handoff_ms(
        workers.loads.rates,
        workers.hit_tokens,
        demand.prompt_tokens,
        model.kv_bytes_per_token,
        model.link_bytes_per_s,
    )


def _decode_ms(workers: WorkersView, demand: Demand, model: CostModel) -> NDArray[np.float64]:
    expected = model.answer_tokens_expected
    steps = min(demand.answer_tokens_max, expected)
    return decode_ms(
        workers.loads.counts,
        workers.hit_tokens,
        demand.prompt_tokens,
        (steps, expected, model.running_max),
        (model.decode_step_ms, model.decode_step_ms_per_sequence),
    )


def _draw_cheapest(costs: NDArray[np.float64], rng: random.Random) -> int:
    """Position of the least cost, at random among equal ones."""
    return int(rng.choice(cheapest(costs, _TIE_MS).tolist()))
