"""Order of service: shares by tokens, classes by weight, tenants alike."""

from __future__ import annotations

from collections import Counter

import pytest

from router.fair_queue import FairQueue
from router.request import ServiceClass
from router.work import Work

STANDARD, INTERACTIVE, BATCH = (
    ServiceClass.STANDARD,
    ServiceClass.INTERACTIVE,
    ServiceClass.BATCH,
)
WEIGHTS = {STANDARD: 2.0, INTERACTIVE: 4.0, BATCH: 1.0}


class Bench:
    """A queue of named requests."""

    def __init__(self) -> None:
        self.queue: FairQueue[str] = FairQueue(WEIGHTS)
        self.where: dict[str, tuple[ServiceClass, str, int]] = {}
        self.pushed = 0

    def push(
        self, tenant: str, tokens: int, count: int = 1, of: ServiceClass = STANDARD
    ) -> list[str]:
        names = []
        for _ in range(count):
            self.pushed += 1
            name = f"{tenant}{self.pushed}"
            self.queue.push(name, of, tenant, Work(tokens))
            self.where[name] = (of, tenant, tokens)
            names.append(name)
        return names

    def serve(self, count: int = 1) -> list[str]:
        served = []
        for _ in range(count):
            item = self.queue.head(lambda tenant: True)
            assert item is not None
            self.queue.serve(item, *self.where[item][:2])
            served.append(item)
        return served

    def tokens_of(self, served: list[str], by: int) -> Counter[object]:
        total: Counter[object] = Counter()
        for name in served:
            total[self.where[name][by]] += self.where[name][2]
        return total


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    bench = Bench()
    names = bench.push("a", 10, 3)
    assert bench.serve(3) == names
    assert bench.queue.head(lambda tenant: True) is None


def test_tenants_get_the_same_tokens_however_many_they_ask_for() -> None:
    bench = Bench()
    bench.push("flood", 10, 300)
    bench.push("long", 100, 30)
    bench.push("short", 5, 60)
    tokens = bench.tokens_of(bench.serve(90), by=1)
    # A tenant is ahead of another by no more than its last request.
    assert max(tokens.values()) - min(tokens.values()) <= 100


def test_classes_get_tokens_by_their_weights() -> None:
    bench = Bench()
    for each in ServiceClass:
        bench.push("a", 10, 200, of=each)
    tokens = bench.tokens_of(bench.serve(140), by=0)
    assert tokens[INTERACTIVE] == pytest.approx(800, abs=20)
    assert tokens[STANDARD] == pytest.approx(400, abs=20)
    assert tokens[BATCH] == pytest.approx(200, abs=20)


def test_a_few_requests_may_be_caught_up_on_and_no_more() -> None:
    bench = Bench()
    bench.push("a", 10, 200)
    bench.serve(100)
    bench.push("b", 10, 100)
    tokens = bench.tokens_of(bench.serve(80), by=1)
    assert 70 <= tokens["b"] - tokens["a"] <= 90


def test_who_comes_when_there_was_enough_for_all_has_nothing_to_catch_up_on() -> None:
    bench = Bench()
    for _ in range(20):
        bench.push("a", 10)
        bench.serve()
    bench.push("b", 10, 100)
    bench.push("a", 10, 10)
    assert bench.tokens_of(bench.serve(10), by=1) == {"a": 50, "b": 50}
    # What b was served since, a third one went without.
    bench.push("c", 10, 100)
    tokens = bench.tokens_of(bench.serve(30), by=1)
    assert tokens["c"] - tokens["b"] >= 70


def test_a_crowd_of_which_nothing_waits_is_one() -> None:
    bench = Bench()
    for _ in range(20):
        (name,) = bench.push("a", 10)
        bench.queue.serve(name, *bench.where[name][:2], is_crowded=True)
    bench.push("a", 10, 20)
    bench.push("b", 10, 20)
    tokens = bench.tokens_of(bench.serve(20), by=1)
    assert tokens["b"] - tokens["a"] >= 70


def test_who_is_refused_for_lack_of_room_has_nothing_to_catch_up_on() -> None:
    bench = Bench()
    bench.push("a", 10, 200)
    bench.serve(100)
    bench.push("b", 10, 100)
    bench.queue.forfeit(STANDARD, "b")
    bench.queue.forfeit(STANDARD, "nobody")
    tokens = bench.tokens_of(bench.serve(20), by=1)
    assert abs(tokens["b"] - tokens["a"]) <= 20


def test_who_left_in_debt_comes_back_in_debt() -> None:
    bench = Bench()
    bench.push("a", 10, 10)
    bench.push("b", 100)
    bench.serve(2)
    # b was served 100 tokens, a ten: it takes nine more of a's before b is next again.
    bench.push("b", 100)
    assert [name[0] for name in bench.serve(10)] == list("aaaaaaaaab")


def test_what_was_not_used_is_given_back_and_what_was_is_charged() -> None:
    bench = Bench()
    bench.push("a", 10, 20)
    bench.push("b", 10, 20)
    bench.serve(2)
    bench.queue.settle(STANDARD, "a", 50)
    assert [name[0] for name in bench.serve(5)] == list("bbbbb")
    bench.queue.settle(STANDARD, "a", -50)
    assert [name[0] for name in bench.serve(5)] == list("aaaaa")


def test_who_may_not_go_is_passed_by() -> None:
    bench = Bench()
    bench.push("a", 10, 2)
    bench.push("b", 1000)
    assert bench.queue.head(lambda tenant: tenant == "b") == "b3"
    assert bench.queue.head(lambda tenant: False) is None


def test_what_leaves_counts_no_more() -> None:
    bench = Bench()
    first, second = bench.push("a", 10, 2)
    bench.queue.remove(first, STANDARD, "a")
    assert (len(bench.queue), bench.queue.count(STANDARD)) == (1, 1)
    assert bench.serve() == [second]
    bench.queue.forget("a")
    assert bench.push("a", 10) == bench.serve()


def test_a_new_request_waits_for_what_is_before_it() -> None:
    bench = Bench()
    bench.push("flood", 10, 100)
    behind = bench.queue.ahead_of_new(STANDARD, "flood")
    assert (behind.prompt_tokens, behind.sequences) == (1000, 100)
    modest = bench.queue.ahead_of_new(STANDARD, "modest")
    assert modest.prompt_tokens == 0
    bench.push("modest", 10, 10)
    modest = bench.queue.ahead_of_new(STANDARD, "modest")
    assert (modest.prompt_tokens, modest.sequences) == (200, 20)
    # A class of twice the weight: half as much of the others before each of its own.
    bench.push("modest", 10, 10, of=INTERACTIVE)
    quick = bench.queue.ahead_of_new(INTERACTIVE, "modest")
    assert (quick.prompt_tokens, quick.sequences) == (150, 15)


@pytest.mark.parametrize("tenant", ["flood", "modest"])
def test_the_prediction_is_what_happens_if_nobody_comes_after(tenant: str) -> None:
    bench = Bench()
    bench.push("flood", 10, 40)
    bench.push("other", 7, 20)
    bench.push("modest", 10, 5)
    bench.push("other", 5, 30, of=BATCH)
    bench.serve(11)
    expected = bench.queue.ahead_of_new(STANDARD, tenant)
    (name,) = bench.push(tenant, 10)
    served = bench.serve(len(bench.queue))
    # Each tenant and class may be one request further than its share.
    before = served[: served.index(name)]
    tokens = sum(bench.where[each][2] for each in before)
    assert tokens == pytest.approx(expected.prompt_tokens, abs=32)
    assert len(before) == pytest.approx(expected.sequences, abs=4)
