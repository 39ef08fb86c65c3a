"""Which workers serve a request: the ones with the least predicted time. Pure.

Everything is in milliseconds until the answer is complete:

    prefill worker   (queued + own uncached prompt tokens) / its measured rate
    handoff          bytes the decode worker does not hold yet / its measured link rate
    decode worker    slow-down of each step by the sequences beside it, and a wait for an answer
                     to end when it has no place or no KV slots left

What has not been measured yet takes the defaults of `CostModel`. The prefill part depends on
the prefill worker alone and the rest on the decode worker alone, so the best pair is found
without trying every pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import WorkerUnavailable
from kvferry.membership import Role

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from kvferry.ids import WorkerId
    from kvferry.membership import WorkerInfo
    from router.load import LoadEstimate

_TIE_MS = 1e-6
"""Costs closer than this are equal: it absorbs rounding, nothing more."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One usable worker as the policy sees it."""

    info: WorkerInfo
    hit_tokens: int
    """Leading prompt tokens in its radix cache; at least one token is always computed."""
    load: LoadEstimate


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The usable workers at one moment, for one prompt."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]
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


@dataclass(frozen=True, slots=True)
class Route:
    """Where one attempt goes."""

    decode: WorkerInfo
    prefill: WorkerInfo | None
    """None: the decode worker computes the prompt itself."""
    prefill_tokens: int
    """Prompt tokens that the computing worker does not have."""
    cost_ms: float

    @property
    def computing(self) -> WorkerInfo:
        """The worker that computes the prompt."""
        return self.prefill or self.decode

    @property
    def workers(self) -> frozenset[WorkerId]:
        """Everyone who takes part."""
        return frozenset({self.decode.worker_id, self.computing.worker_id})


def choose_route(
    view: ClusterView,
    demand: Demand,
    model: CostModel,
    avoid: frozenset[WorkerId],
    rng: random.Random,
) -> Route:
    """The cheapest route; equally cheap ones are drawn at random.

    Workers in `avoid` are taken only where there is no other. Raises `WorkerUnavailable` when
    nobody can decode.
    """
    decoders = _without(view.decode, avoid)
    if not decoders:
        raise WorkerUnavailable("no decode worker is reachable")
    prefillers = _without(view.prefill, avoid)
    prefill_costs = [_prefill_ms(worker, demand, model) for worker in prefillers]
    routes: list[tuple[float, WorkerView, bool]] = []
    for worker in decoders:
        cost = _decode_ms(worker, demand, model)
        is_local = not prefillers or _prefills_itself(worker, demand, model)
        if is_local:
            cost += _prefill_ms(worker, demand, model)
        else:
            cost += min(prefill_costs) + _handoff_ms(worker, demand, model)
        routes.append((cost, worker, is_local))
    picked = _draw_cheapest([cost for cost, _, _ in routes], rng)
    cost, decoder, is_local = routes[picked]
    computing = decoder if is_local else prefillers[_draw_cheapest(prefill_costs, rng)]
    return Route(
        decode=decoder.info,
        prefill=None if is_local else computing.info,
        prefill_tokens=_uncached(computing, demand),
        cost_ms=cost,
    )


def _without(workers: tuple[WorkerView, ...], avoid: frozenset[WorkerId]) -> tuple[WorkerView, ...]:
    preferred = tuple(worker for worker in workers if worker.info.worker_id not in avoid)
    return preferred or workers


def _prefills_itself(worker: WorkerView, demand: Demand, model: CostModel) -> bool:
    if worker.info.role is Role.BOTH:
        return True
    return _uncached(worker, demand) <= model.local_prefill_tokens_max


def _uncached(worker: WorkerView, demand: Demand) -> int:
    return max(1, demand.prompt_tokens - worker.hit_tokens)


def _prefill_ms(worker: WorkerView, demand: Demand, model: CostModel) -> float:
    rate = worker.load.prefill_tokens_per_s or model.prefill_tokens_per_s
    return 1000.0 * (worker.load.prefill_tokens + _uncached(worker, demand)) / rate


def _handoff_ms(worker: WorkerView, demand: Demand, model: CostModel) -> float:
    rate = worker.load.link_bytes_per_s or model.link_bytes_per_s
    moved = max(0, demand.prompt_tokens - worker.hit_tokens) * model.kv_bytes_per_token
    return 1000.0 * moved / rate


def _decode_ms(worker: WorkerView, demand: Demand, model: CostModel) -> float:
    load = worker.load
    steps = min(demand.answer_tokens_max, model.answer_tokens_expected)
    beside = min(load.sequences, model.running_max - 1)
    step_ms = model.decode_step_ms + beside * model.decode_step_ms_per_sequence
    needed = demand.prompt_tokens - worker.hit_tokens + steps
    no_slots = load.kv_slots_available is not None and load.kv_slots_available < needed
    rounds_before = max(load.sequences // model.running_max, int(no_slots))
    return step_ms * (steps + rounds_before * model.answer_tokens_expected)


def _draw_cheapest(costs: Sequence[float], rng: random.Random) -> int:
    """Position of the least cost, at random among equal ones."""
    bound = min(costs) + _TIE_MS
    return rng.choice([position for position, cost in enumerate(costs) if cost <= bound])
