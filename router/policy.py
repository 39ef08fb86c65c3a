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
from router.policies.pool import NO_HEAT, PoolView

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvferry.ids import WorkerId
    from kvferry.membership import WorkerInfo
    from router.load import LoadEstimate
    from router.policies.catalogue import Policy
    from router.policies.history import PlacementHistory
    from router.policies.pool import Prompt

_TIE_MS = 1e-6
"""Costs closer than this are equal: it absorbs rounding, nothing more."""

_PENDING_S = 10.0
"""A prompt sent no longer ago than this to a worker that has prompts to compute may be one of
them."""

_EVENT_DELAY_S = 1.0
"""Of what a worker with nothing left to compute was sent before, events have told by now."""


class WorkerView(NamedTuple):
    """One usable worker as the policy sees it. A tuple, because a request makes one per worker."""

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


@dataclass(frozen=True, slots=True)
class Placement:
    """By what the computing worker of a prompt is chosen."""

    policy: Policy
    prompt: Prompt
    history: PlacementHistory
    """Only read."""
    now: float


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
    if not decoders:
        raise WorkerUnavailable("no decode worker is reachable")
    prefillers = _without(view.prefill, avoid)
    local: list[WorkerView] = []
    partners: list[WorkerView] = []
    for worker in decoders:
        is_alone = not prefillers or _prefills_itself(worker, demand, model)
        (local if is_alone else partners).append(worker)
    candidates = [*(prefillers if partners else ()), *local]
    # What comes after the prompt is computed: shape [partners] and [candidates].
    ending = [_handoff_ms(one, demand, model) + _decode_ms(one, demand, model) for one in partners]
    after = [min(ending)] * (len(candidates) - len(local)) if partners else []
    after += [_decode_ms(worker, demand, model) for worker in local]
    costs = _costs(candidates, model, placement)
    if placement.policy.is_time:
        costs += after
    position = _draw_cheapest(costs, rng)
    computing = candidates[position]
    is_local = position >= len(candidates) - len(local)
    decoder = computing if is_local else partners[_draw_cheapest(np.array(ending), rng)]
    return Route(
        decode=decoder.info,
        prefill=None if is_local else computing.info,
        prefill_tokens=_uncached(computing, demand),
        cost_ms=_prefill_ms(computing, demand, model) + after[position],
    )


def _costs(
    workers: Sequence[WorkerView], model: CostModel, placement: Placement
) -> NDArray[np.float64]:
    """Of having each worker compute the prompt, as the policy has it; shape [workers]."""
    pool = _pool_of(workers, model, placement)
    return placement.policy.costs(pool, placement.prompt)


def _pool_of(workers: Sequence[WorkerView], model: CostModel, placement: Placement) -> PoolView:
    loads = [worker.load for worker in workers]
    names = [name_hash(worker.info.worker_id) for worker in workers]
    rates = [load.prefill_tokens_per_s or model.prefill_tokens_per_s for load in loads]
    tokens_per_ms = np.array(rates) / 1000.0
    queued = np.array([load.prefill_tokens for load in loads])
    prompt, history, now = placement.prompt, placement.history, placement.now
    # Sent and not computed yet: no event can tell of it, but the next prompt will find it there.
    since = [now - (_PENDING_S if load.prefill_tokens else _EVENT_DELAY_S) for load in loads]
    hits = np.array([worker.hit_tokens for worker in workers], dtype=np.int64)
    hits = np.maximum(hits, history.sent_tokens(names, prompt, since))
    sent = hits
    if placement.policy.reads_sent:
        sent = history.sent_tokens(names, prompt, [float("-inf")] * len(names))
    return PoolView(
        names=np.array(names, dtype=np.uint64),
        hit_tokens=hits,
        queue_ms=queued / tokens_per_ms,
        tokens_per_ms=tokens_per_ms,
        requests=np.array([load.requests for load in loads], dtype=np.int64),
        active_tokens=np.array([load.active_tokens for load in loads], dtype=np.int64),
        slots=np.array([load.kv_slots_total or 0 for load in loads], dtype=np.int64),
        sent_tokens=sent,
        turn=history.turn,
        typical_tokens=history.typical_tokens,
        heat=history.heat(prompt, hits) if placement.policy.reads_heat else NO_HEAT,
    )


@lru_cache(maxsize=4096)
def name_hash(worker_id: WorkerId) -> int:
    """64 bits, the same in every router."""
    return int.from_bytes(blake2b(worker_id.encode(), digest_size=8).digest(), "little")


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


def _draw_cheapest(costs: NDArray[np.float64], rng: random.Random) -> int:
    """Position of the least cost, at random among equal ones."""
    positions = np.flatnonzero(costs <= costs.min() + _TIE_MS)
    return int(rng.choice(positions.tolist()))
