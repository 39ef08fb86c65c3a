"""Who asks for more than its share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.demand import DemandBook, level_of


def ask(demand: DemandBook, tenant: str, share: float, until_s: float, from_s: float = 0.0) -> None:
    """Ten requests a second which take that share of the fleet together."""
    for number in range(round(10 * from_s), round(10 * until_s)):
        demand.asked(tenant, share / 10, number / 10)


def test_while_there_is_enough_nobody_crowds() -> None:
    demand = DemandBook()
    for tenant in ("a", "b"):
        ask(demand, tenant, 0.45, 20.0)
    assert not demand.crowding(20.0)
    assert not demand.is_modest("a", 20.0)


def test_a_flood_crowds_and_those_beside_it_do_not() -> None:
    demand = DemandBook()
    for tenant, share in (("modest", 0.1), ("more", 0.25), ("flood", 3.0)):
        ask(demand, tenant, share, 20.0)
    assert demand.crowding(20.0) == {"flood"}
    assert demand.is_modest("modest", 20.0)
    assert demand.is_modest("more", 20.0)
    assert demand.is_modest("never heard of", 20.0)
    assert not demand.is_modest("flood", 20.0)


def test_a_flood_crowds_within_two_seconds_and_is_forgotten_after_some() -> None:
    demand = DemandBook()
    ask(demand, "modest", 0.1, 10.0)
    ask(demand, "flood", 3.0, 12.0, from_s=10.0)
    assert demand.crowding(12.0) == {"flood"}
    assert not demand.crowding(17.0)


def test_who_asks_for_a_little_more_than_there_is_crowds_too() -> None:
    demand = DemandBook()
    ask(demand, "modest", 0.05, 20.0)
    ask(demand, "flood", 1.3, 20.0)
    assert demand.crowding(20.0) == {"flood"}


def test_all_that_ask_for_too_much_crowd() -> None:
    demand = DemandBook()
    for tenant in ("a", "b", "c", "d"):
        ask(demand, tenant, 0.75, 20.0)
    assert demand.crowding(20.0) == {"a", "b", "c", "d"}


def test_who_is_forgotten_asks_for_nothing() -> None:
    demand = DemandBook()
    ask(demand, "flood", 3.0, 20.0)
    demand.forget("flood")
    demand.forget("never heard of")
    assert not demand.crowding(20.0)


def test_one_long_answer_is_no_flood() -> None:
    """Eight places, each held for a minute: a turn of 7.5 s, and one a minute."""
    demand = DemandBook()
    for number in range(10):
        demand.asked("slow", 7.5, 60.0 * number)
    assert not demand.crowding(540.0)
    for number in range(40):
        demand.asked("flood", 7.5, 600.0 + number)
    assert demand.crowding(640.0) == {"flood"}


def test_of_many_tenants_who_crowds_is_found_now_and_then() -> None:
    demand = DemandBook()
    for tenant in range(100):
        ask(demand, f"t{tenant}", 0.005, 1.0)
    ask(demand, "flood", 3.0, 12.0, from_s=9.0)
    assert demand.crowding(12.0) == {"flood"}
    ask(demand, "other", 5.0, 22.0, from_s=12.0)
    assert demand.crowding(22.0) == {"other"}


@given(st.lists(st.floats(0.001, 3.0), min_size=1).map(sorted))
def test_the_level_gives_out_what_there_is(shares: list[float]) -> None:
    level = level_of(shares)
    if math.isinf(level):
        assert sum(shares) <= 1.0 + 1e-9
    else:
        assert sum(min(share, level) for share in shares) == pytest.approx(1.0)
