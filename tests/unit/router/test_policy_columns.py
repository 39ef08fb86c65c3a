"""Columns against one worker after the other, on random fleets."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.accounts import KvAccounts, WorkerLoad
from kvferry.ids import Incarnation, WorkerId
from kvferry.membership import Role, WorkerInfo
from kvferry.router_config import PolicyName
from router.load import SLOTS_UNKNOWN, LoadBook
from router.policies.catalogue import POLICIES
from router.policies.history import PlacementHistory
from router.policies.pool import Prompt
from router.policy import CostModel, Demand, Placement, name_hash
from tests.support.chosen_route import choose_route
from tests.support.plain_route import copies_price_ms, costs_ms, uncached
from tests.support.worker_states import WorkerState, cluster_view

if TYPE_CHECKING:
    from router.load import DispatchTicket

BLOCK = 16
MODEL = CostModel(kv_bytes_per_token=1000, running_max=8, local_prefill_tokens_max=100)
CHAIN = np.arange(1, 65, dtype=np.uint64)
ENDS = np.arange(1, 65, dtype=np.int64) * BLOCK
WHOLE = Prompt(1030, CHAIN, ENDS)


def fleet(rng: random.Random) -> list[WorkerState]:
    roles = rng.choice([(Role.BOTH,), (Role.PREFILL, Role.DECODE), tuple(Role)])
    workers = [worker(number, rng.choice(roles), rng) for number in range(rng.randrange(1, 24))]
    return [*workers, worker(24, rng.choice([Role.BOTH, Role.DECODE]), rng)]


def worker(number: int, role: Role, rng: random.Random) -> WorkerState:
    return WorkerState(
        WorkerInfo(WorkerId(f"w{number}"), role, Incarnation(1), f"w{number}:1"),
        hit_tokens=rng.choice([0, 0, 320, 640, 960, 1024]),
        prefill_tokens=rng.choice([0, rng.randrange(4000)]),
        sequences=rng.randrange(20),
        requests=rng.randrange(40),
        active_tokens=rng.randrange(9000),
        prefill_tokens_per_s=rng.choice([0.0, 300.0, 9000.0]),
        link_bytes_per_s=rng.choice([0.0, 1e5]),
        slots_available=rng.choice([None, 0, 500, 5000]),
        slots_total=rng.choice([None, 6000]),
    )


def past(rng: random.Random, workers: list[WorkerState], now: float) -> PlacementHistory:
    """Some parts of the same chain, sent hither and thither."""
    history = PlacementHistory()
    for _ in range(rng.randrange(60)):
        blocks = rng.randrange(1, 65)
        prompt = Prompt(blocks * BLOCK, CHAIN[:blocks], ENDS[:blocks])
        name = name_hash(rng.choice(workers).info.worker_id)
        history.record(
            name, prompt, rng.randrange(1, 1000), rng.randrange(prompt.tokens), now - 20.0
        )
    return history


@pytest.mark.parametrize("policy", [PolicyName.PRICED_TIME, PolicyName.MIN_TTFT])
@pytest.mark.parametrize("seed", range(60))
def test_the_route_is_the_cheapest_of_all_pairs(policy: PolicyName, seed: int) -> None:
    rng = random.Random(seed)
    workers, now = fleet(rng), 100.0
    history = past(rng, workers, now)
    placement = Placement(POLICIES[policy], WHOLE, history, now)
    demand = Demand(WHOLE.tokens, rng.choice([10, 500]))
    route = choose_route(cluster_view(workers), demand, MODEL, frozenset(), rng, placement)

    model = usual_model(workers)
    is_priced = policy is PolicyName.PRICED_TIME
    price = prices(workers, demand, model, history, now) if is_priced else {}
    names = [each.info.worker_id for each in workers]
    costs = costs_ms(workers, demand, model, {name: price.get(name, 0.0) for name in names})
    source = None if route.prefill is None else route.prefill.worker_id
    assert costs[source, route.decode.worker_id] == pytest.approx(min(costs.values()), abs=1e-6)
    plain = costs_ms(workers, demand, model, dict.fromkeys(names, 0.0))
    assert route.cost_ms == pytest.approx(plain[source, route.decode.worker_id])
    (computing,) = (each for each in workers if each.info == route.computing)
    assert route.prefill_tokens == uncached(computing, demand)


def usual_model(workers: list[WorkerState]) -> CostModel:
    """Of who was not measured yet: as fast as the others in their mean."""
    rates = [each.prefill_tokens_per_s for each in workers if each.prefill_tokens_per_s]
    links = [each.link_bytes_per_s for each in workers if each.link_bytes_per_s]
    return replace(
        MODEL,
        prefill_tokens_per_s=fmean(rates) if rates else MODEL.prefill_tokens_per_s,
        link_bytes_per_s=fmean(links) if links else MODEL.link_bytes_per_s,
    )


def prices(
    workers: list[WorkerState],
    demand: Demand,
    model: CostModel,
    history: PlacementHistory,
    now: float,
) -> dict[WorkerId, float]:
    """Of those that may compute."""
    sources = [each for each in workers if each.info.role is Role.PREFILL]
    decoders = [each for each in workers if each.info.role is not Role.PREFILL]
    limit = MODEL.local_prefill_tokens_max
    local = [
        each
        for each in decoders
        if each.info.role is Role.BOTH or uncached(each, demand) <= limit or not sources
    ]
    computing = [*(sources if len(local) < len(decoders) else []), *local]
    hits = [each.hit_tokens for each in computing]
    heat = history.heat(WHOLE, np.array(hits, dtype=np.int64), now)
    told = zip(heat.level_requests.tolist(), heat.level_seconds.tolist(), strict=True)
    uses = dict(zip(heat.level_tokens.tolist(), told, strict=True))
    assert sorted(uses) == sorted(set(hits) - {0})
    rates = [(each.prefill_tokens_per_s or model.prefill_tokens_per_s) / 1e3 for each in computing]
    busy = sum(each.prefill_tokens > 0 for each in computing) / len(computing)
    found = copies_price_ms(hits, rates, uses, WHOLE.tokens, busy, history)
    return {each.info.worker_id: ms for each, ms in zip(computing, found, strict=True)}


@pytest.mark.parametrize("seed", range(5))
def test_what_was_sent_counts_as_held_while_it_may_be_pending(seed: int) -> None:
    """Of a worker with a queue for ten seconds, of another one for one."""
    rng = random.Random(seed)
    for _ in range(20):
        name = WorkerInfo(WorkerId("a"), Role.BOTH, Incarnation(1), "a:1")
        queued, age = rng.choice([0, 10]), rng.choice([0.0, 0.9, 1.1, 9.9, 10.1])
        state = WorkerState(name, hit_tokens=160, prefill_tokens=queued)
        history = PlacementHistory()
        history.record(name_hash(name.worker_id), WHOLE, 1, 0, now=100.0)
        by = Placement(POLICIES[PolicyName.MIN_TTFT], WHOLE, history, 100.0 + age)
        view, demand = cluster_view([state]), Demand(WHOLE.tokens, 10)
        seen: list[int] = []
        spy = Placement(_spying(by, seen), WHOLE, history, by.now)
        choose_route(view, demand, MODEL, frozenset(), rng, spy)
        assert seen == [1024 if age <= (10.0 if queued else 1.0) else 160]


def _spying(by: Placement, seen: list[int]):
    def costs(pool, prompt):
        seen.extend(pool.hit_tokens.tolist())
        return by.policy.costs(pool, prompt)

    return type(by.policy)(costs, is_time=True)


@pytest.mark.parametrize("seed", range(30))
def test_loads_are_the_sums_over_what_is_in_flight(seed: int) -> None:
    rng = random.Random(seed)
    names = [WorkerId(f"w{number}") for number in range(4)]
    loads, now = LoadBook(), 0.0
    for name in names:
        loads.add(name)
    tickets: list[DispatchTicket] = []
    for _ in range(150):
        now += rng.choice([0.0, 1.0])
        match rng.randrange(6):
            case 0 | 1 | 2:
                tickets.append(_send(loads, rng, now, names))
            case 3 if tickets:
                loads.prefilled(rng.choice(tickets))
            case 4 if tickets:
                loads.end(tickets.pop(rng.randrange(len(tickets))))
            case 5:
                name, asked_at = rng.choice(names), now - rng.choice([0.0, 1.0])
                load = WorkerLoad(rng.randrange(4), rng.randrange(4), rng.randrange(300))
                loads.report(name, asked_at, load, KvAccounts(900, 50, 50, 0, 0, 1000, 0, 0, 64))
        if rng.randrange(40) == 0:
            loads.add(rng.choice(names))
        seen = loads.loads(loads.rows_of(names)).counts
        for row, name in enumerate(names):
            assert tuple(seen[row].tolist()) == _counts(loads, name)
            assert loads.active_tokens(name) == seen[row, 3]


def _send(loads: LoadBook, rng: random.Random, now: float, names: list[WorkerId]) -> DispatchTicket:
    return loads.dispatch(
        now,
        prefill=rng.choice(names),
        decode=rng.choice(names),
        prefill_tokens=rng.randrange(1, 90),
        kv_tokens=rng.randrange(90, 200),
        sequences=rng.randrange(1, 4),
        goes_first=rng.random() < 0.3,
    )


def _counts(loads: LoadBook, name: WorkerId) -> tuple[int, ...]:
    """By the description of `Loads`, ticket by ticket."""
    entry = loads._workers[name]
    fresh = [ticket for ticket in entry.tickets if ticket.dispatched_at > entry.asked_at]
    decoding = [ticket for ticket in fresh if ticket.decode is entry]
    sequences = max(0, entry.load.running + entry.load.waiting - entry.ended_since)
    sequences += sum(ticket.sequences for ticket in decoding)
    for_others = [t for t in fresh if t.decode is not entry and t.prefill_tokens]
    prefill = max(0, entry.load.waiting_tokens - entry.prefilled_since)
    active = [t for t in entry.tickets if t.decode is entry or t.prefill_tokens]
    available = SLOTS_UNKNOWN if entry.slots_total == 0 else 950
    return (
        prefill + sum(t.prefill_tokens for t in fresh if t.prefill is entry),
        sequences,
        sequences + len(for_others),
        sum(ticket.kv_tokens for ticket in active),
        max(0, available - sum(ticket.kv_tokens for ticket in decoding)),
        entry.slots_total,
        sum(t.prefill_tokens for t in entry.tickets if t.prefill is entry and t.goes_first),
    )
