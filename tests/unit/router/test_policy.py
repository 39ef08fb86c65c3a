from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from kvferry.errors import WorkerUnavailable
from kvferry.ids import Incarnation, WorkerId
from kvferry.membership import Role, WorkerInfo
from kvferry.router_config import PolicyName
from router.policies.catalogue import POLICIES
from router.policies.history import PlacementHistory
from router.policies.pool import Prompt
from router.policy import CostModel, Demand, Placement, Route
from tests.support.chosen_route import choose_route
from tests.support.worker_states import WorkerState, cluster_view

MODEL = CostModel(kv_bytes_per_token=1000, running_max=32)
DEMAND = Demand(prompt_tokens=1000, answer_tokens_max=100)


PROMPT = Prompt(1000, np.array([], dtype=np.uint64), np.array([], dtype=np.int64))


def placement(policy: PolicyName = PolicyName.PRICED_TIME) -> Placement:
    history = PlacementHistory(
        reads_sent=POLICIES[policy].reads_sent, reads_heat=POLICIES[policy].reads_heat
    )
    return Placement(POLICIES[policy], PROMPT, history, now=0.0)


def worker(name: str, role: Role, hit: int = 0, **load: object) -> WorkerState:
    info = WorkerInfo(WorkerId(name), role, Incarnation(1), f"{name}:1")
    return WorkerState(info, hit, **load)


def choose(*workers: WorkerState, model: CostModel = MODEL, avoid: tuple[str, ...] = ()) -> Route:
    avoided = frozenset(map(WorkerId, avoid))
    return choose_route(
        cluster_view(workers), DEMAND, model, avoided, random.Random(1), placement()
    )


def names(route: Route) -> tuple[str | None, str]:
    return (route.prefill and route.prefill.worker_id, route.decode.worker_id)


def test_a_pair_serves_a_request_together() -> None:
    route = choose(worker("p", Role.PREFILL), worker("d", Role.DECODE))
    assert names(route) == ("p", "d")
    assert route.prefill_tokens == 1000
    # 1000 tokens at 400/s, 1 MB at 1 GB/s, 100 steps of 60 ms.
    assert route.cost_ms == pytest.approx(2500 + 1 + 6000)


def test_without_a_prefill_worker_the_decode_worker_prefills() -> None:
    assert names(choose(worker("d", Role.DECODE))) == (None, "d")


def test_without_a_decode_worker_there_is_no_route() -> None:
    with pytest.raises(WorkerUnavailable, match="decode worker"):
        choose(worker("p", Role.PREFILL))


def test_the_prefix_decides_among_equal_prefill_workers() -> None:
    route = choose(
        worker("p1", Role.PREFILL, hit=100),
        worker("p2", Role.PREFILL, hit=900),
        worker("d", Role.DECODE),
    )
    assert (names(route), route.prefill_tokens) == (("p2", "d"), 100)


def test_a_queue_outweighs_a_prefix() -> None:
    route = choose(
        worker("p1", Role.PREFILL),
        worker("p2", Role.PREFILL, hit=900, prefill_tokens=5000),
        worker("d", Role.DECODE),
    )
    assert names(route) == ("p1", "d")


def test_a_measured_rate_replaces_the_default() -> None:
    route = choose(
        worker("p1", Role.PREFILL, prefill_tokens_per_s=1000.0),
        worker("p2", Role.PREFILL),
        worker("d", Role.DECODE),
    )
    assert names(route) == ("p1", "d")


def test_a_slow_link_makes_the_decode_side_prefix_count() -> None:
    route = choose(
        worker("p", Role.PREFILL),
        worker("d1", Role.DECODE, link_bytes_per_s=1e5),
        worker("d2", Role.DECODE, link_bytes_per_s=1e5, hit=500, sequences=5),
    )
    assert names(route) == ("p", "d2")


def test_a_worker_that_was_not_measured_yet_is_taken_for_as_fast_as_the_others() -> None:
    """By the default, of a slow machine, it would never be given anything, and never measured."""
    measured = [
        worker(f"p{n}", Role.PREFILL, prefill_tokens=9000, prefill_tokens_per_s=8000.0)
        for n in range(2)
    ]
    decode = worker("d", Role.DECODE)
    new = worker("new", Role.PREFILL, prefill_tokens=4000)
    assert names(choose(*measured, new, decode)) == ("new", "d")
    busy = worker("new", Role.PREFILL, prefill_tokens=20_000)
    assert names(choose(*measured, busy, decode))[0] != "new"


def test_the_less_busy_decode_worker_is_taken() -> None:
    route = choose(
        worker("p", Role.PREFILL),
        worker("d1", Role.DECODE, sequences=3),
        worker("d2", Role.DECODE, sequences=2),
    )
    assert names(route) == ("p", "d2")


def test_a_full_decode_worker_costs_a_wait() -> None:
    route = choose(
        worker("p", Role.PREFILL),
        worker("d1", Role.DECODE, slots_available=500),
        worker("d2", Role.DECODE, slots_available=5000, sequences=10),
    )
    assert names(route) == ("p", "d2")


def test_a_worker_of_both_roles_needs_no_source() -> None:
    route = choose(worker("p", Role.PREFILL), worker("b", Role.BOTH))
    assert (names(route), route.computing.worker_id) == ((None, "b"), "b")


def test_a_pair_and_a_worker_of_both_roles_compete_by_cost() -> None:
    pair = (worker("p", Role.PREFILL), worker("d", Role.DECODE))
    assert names(choose(*pair, worker("b", Role.BOTH, prefill_tokens=500))) == ("p", "d")
    assert names(choose(*pair, worker("b", Role.BOTH, hit=500))) == (None, "b")


@pytest.mark.parametrize(("hit", "source"), [(895, "p"), (900, None)])
def test_a_short_uncached_part_is_computed_where_it_is_decoded(
    hit: int, source: str | None
) -> None:
    model = dataclasses.replace(MODEL, local_prefill_tokens_max=100)
    route = choose(worker("p", Role.PREFILL), worker("d", Role.DECODE, hit=hit), model=model)
    assert names(route) == (source, "d")


def test_at_least_one_token_is_computed() -> None:
    route = choose(worker("p", Role.PREFILL, hit=1008), worker("d", Role.DECODE, hit=1008))
    assert (names(route), route.prefill_tokens) == (("p", "d"), 1)


def test_workers_to_avoid_are_avoided_where_there_is_another() -> None:
    workers = (
        worker("p1", Role.PREFILL),
        worker("p2", Role.PREFILL, prefill_tokens=5000),
        worker("d", Role.DECODE),
    )
    assert names(choose(*workers, avoid=("p1", "d"))) == ("p2", "d")


def test_ties_are_drawn_evenly() -> None:
    workers = [worker(f"p{n}", Role.PREFILL) for n in range(2)]
    workers += [worker(f"d{n}", Role.DECODE) for n in range(2)]
    rng = random.Random(3)
    by = placement()
    drawn = [
        names(choose_route(cluster_view(workers), DEMAND, MODEL, frozenset(), rng, by))
        for _ in range(400)
    ]
    counts = {pair: drawn.count(pair) for pair in set(drawn)}
    assert len(counts) == 4
    assert all(70 <= count <= 130 for count in counts.values()), counts


@pytest.mark.parametrize("policy", [PolicyName.PRICED_TIME, PolicyName.MIN_TTFT])
def test_a_joint_choice_is_the_least_of_all_pairs(policy: PolicyName) -> None:
    """Against every pair priced one by one: a view of that pair alone has no other route."""
    rng = random.Random(7)
    for _ in range(40):
        workers = [
            worker(
                f"w{number}",
                rng.choice(list(Role)),
                hit=rng.randrange(0, 1000, 50),
                prefill_tokens=rng.randrange(4000),
                sequences=rng.randrange(20),
                link_bytes_per_s=rng.choice([2e5, 1e5]),
            )
            for number in range(6)
        ]
        workers.append(worker("d", Role.DECODE, link_bytes_per_s=1e5))
        by = placement(policy)
        route = choose_route(cluster_view(workers), DEMAND, MODEL, frozenset(), rng, by)
        # Nothing is priced without a past, so the time of the route is what was least.
        sources = [each for each in workers if each.info.role is Role.PREFILL]
        pairs = [
            cluster_view((decode,) if source is None else (source, decode))
            for source in sources or [None]
            for decode in workers
            if decode.info.role is not Role.PREFILL
        ]
        costs = [choose_route(pair, DEMAND, MODEL, frozenset(), rng, by).cost_ms for pair in pairs]
        assert route.cost_ms == pytest.approx(min(costs))
        assert route.decode.role is not Role.PREFILL


@pytest.mark.parametrize("policy", PolicyName)
def test_no_policy_takes_a_worker_to_avoid(policy: PolicyName) -> None:
    workers = [worker(f"p{number}", Role.PREFILL, hit=900 * (number < 2)) for number in range(4)]
    workers += [worker(f"d{number}", Role.DECODE) for number in range(4)]
    avoid = frozenset(map(WorkerId, ("p0", "p1", "d0", "d1")))
    rng, by = random.Random(5), placement(policy)
    for _ in range(30):
        route = choose_route(cluster_view(workers), DEMAND, MODEL, avoid, rng, by)
        assert not route.workers & avoid
