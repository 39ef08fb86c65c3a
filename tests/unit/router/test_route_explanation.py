"""What is explained is what was weighed, on random fleets."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.membership import Role
from kvferry.router_config import PolicyName
from router.policies.catalogue import POLICIES
from router.policies.priced_time import copies_price_ms
from router.policy import Demand, Placement, cheapest_route, weigh
from router.route_explanation import explain
from tests.support.worker_states import cluster_view
from tests.unit.router.test_policy import MODEL, placement, worker
from tests.unit.router.test_policy_columns import MODEL as FLEET_MODEL
from tests.unit.router.test_policy_columns import WHOLE, fleet, past

if TYPE_CHECKING:
    from kvferry.ids import WorkerId

NOBODY: frozenset[WorkerId] = frozenset()


# Of others the past would have to tell what was sent.
@pytest.mark.parametrize("policy", [name for name in PolicyName if not POLICIES[name].reads_sent])
@pytest.mark.parametrize("seed", range(20))
def test_the_first_is_what_was_chosen_and_none_is_cheaper(policy: PolicyName, seed: int) -> None:
    rng = random.Random(seed)
    workers = fleet(rng)
    by = Placement(POLICIES[policy], WHOLE, past(rng, workers, 100.0), 100.0)
    weighing = weigh(cluster_view(workers), Demand(WHOLE.tokens, 50), FLEET_MODEL, NOBODY, by)
    route = cheapest_route(weighing, rng)
    told = explain(weighing, route)
    for side in (told.computing, told.decoding):
        if side:
            first = side[0]
            assert first.computing == route.computing.worker_id
            assert first.decode == route.decode.worker_id
            costs = [each.cost for each in side[1:]]
            assert costs == sorted(costs)
            assert first.cost <= min(costs, default=first.cost) + 1e-6
    assert bool(told.decoding) == (route.prefill is not None)
    assert len({each.computing for each in told.computing}) == len(told.computing)
    assert len({each.decode for each in told.decoding}) == len(told.decoding)


@pytest.mark.parametrize("seed", range(30))
def test_parts_add_up_to_what_was_compared(seed: int) -> None:
    """And what copies count is what the policy's own file says of them."""
    rng = random.Random(seed)
    workers = fleet(rng)
    by = Placement(POLICIES[PolicyName.PRICED_TIME], WHOLE, past(rng, workers, 100.0), now=100.0)
    weighing = weigh(cluster_view(workers), Demand(WHOLE.tokens, 500), FLEET_MODEL, NOBODY, by)
    told = explain(weighing, cheapest_route(weighing, rng), others=len(workers))
    names = [info.worker_id for info in weighing.sides.workers.roster.infos]
    prices = copies_price_ms(weighing.pool, WHOLE)
    assert len(told.computing) == prices.size
    for each in (*told.computing, *told.decoding):
        assert each.total_ms == pytest.approx(each.cost)
        source = names.index(each.computing) - weighing.sides.start
        assert each.copies_ms == pytest.approx(prices[source], abs=1e-6)
    costs = {each.computing: each.cost for each in told.computing}
    ordered = [costs[name] for name in names[weighing.sides.start : weighing.sides.stop]]
    np.testing.assert_allclose(ordered, weighing.costs)


def test_the_parts_of_a_pair_as_by_hand() -> None:
    """1,000 tokens at 400/s of which 600 are there; of 700 that are moved 1 MB/s; 100 steps."""
    workers = [
        worker("p0", Role.PREFILL, hit=600, prefill_tokens=200),
        worker("p1", Role.PREFILL),
        worker("d0", Role.DECODE, hit=300, link_bytes_per_s=1e6, sequences=1),
    ]
    by = placement()
    weighing = weigh(cluster_view(workers), Demand(1000, 100), MODEL, NOBODY, by)
    told = explain(weighing, cheapest_route(weighing, random.Random(0)))
    first, second = told.computing
    assert (first.computing, second.computing) == ("p0", "p1")
    parts = (first.queue_ms, first.prefill_ms, first.copies_ms, first.handoff_ms, first.decode_ms)
    assert parts == pytest.approx((500.0, 1000.0, 0.0, 700.0, 6400.0))
    assert (first.held_tokens, first.decode_held_tokens) == (600, 300)
    assert (second.queue_ms, second.prefill_ms, second.held_tokens) == (0.0, 2500.0, 0)
    assert [each.decode for each in told.decoding] == ["d0"]


def test_weighing_changes_nothing() -> None:
    rng = random.Random(4)
    workers = fleet(rng)
    by = Placement(POLICIES[PolicyName.PRICED_TIME], WHOLE, past(rng, workers, 99.0), 100.0)
    view, demand = cluster_view(workers), Demand(WHOLE.tokens, 50)
    first, again = (weigh(view, demand, FLEET_MODEL, NOBODY, by) for _ in range(2))
    np.testing.assert_array_equal(first.costs, again.costs)
    np.testing.assert_array_equal(first.policy_costs, again.policy_costs)
