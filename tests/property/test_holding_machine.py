"""KV that goes back between workers, amid requests of every kind, on a pool too small.

All that `test_retraction_machine` asserts holds while some of the KV is held, or being filled, by
requests that nobody waits for. Beyond that: none of them is there after somebody was refused or
retracted, and what came in through them is right.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engine.holding import new_holding
from engine.request import Request, Stage
from kvferry.cache_key import CacheUse
from kvferry.ids import Attempt, ExtraKey, RequestId
from tests.property.test_retraction_machine import STEPS, RetractionMachine
from tests.support.state_machines import run_machine

pytestmark = pytest.mark.property

CI_EXAMPLES, SLOW_EXAMPLES = 4, 150
CI_SEEDS = range(1, 24)
SLOW_ROUNDS_MAX = 6
WORTH_SEEING = {"held", "filled", "kept", "gave way", "gave way to a step", "found nothing"}
WORTH_SEEING_OF_MANY = {"retracted", "no room", "gave way to a handoff"}
USE = CacheUse(ExtraKey(""))


class HoldingMachine(RetractionMachine):
    """The same engine, and KV that is given back from it and to it."""

    def __init__(self, page_size: int, index: str, seen: Counter[str]) -> None:
        super().__init__(page_size, index, seen)
        self.holdings: list[Request] = []

    def _alive(self, *stages: Stage) -> list[Request]:
        wanted = stages or (Stage.HELD, Stage.INBOUND)
        return [holding for holding in self.holdings if holding.stage in wanted]

    def _new(self, tokens) -> Request:
        def give_way() -> None:
            assert holding.stage in (Stage.HELD, Stage.INBOUND), "asked twice, or too late"
            self.seen["gave way"] += 1
            self.engine.end(holding)

        name = RequestId(f"holding-{len(self.holdings)}")
        holding = new_holding(name, Attempt(1), tokens, USE, give_way)
        self.holdings.append(holding)
        return holding

    def _tokens(self, data: st.DataObject):
        """Of somebody who was here, or nearly: [n] int32, n >= 1."""
        known = data.draw(st.sampled_from(self.submitted), label="whose").known
        stop = data.draw(st.sampled_from(range(1, len(known) + 1)), label="tokens")
        tokens = known[:stop].copy()
        if data.draw(st.sampled_from((False, True)), label="changed"):
            tokens[stop // 2] = 19
        return tokens

    @precondition(lambda self: self.submitted and len(self._alive()) < 3)
    @rule(data=st.data())
    def hold_cached(self, data):
        holding = self._new(self._tokens(data))
        if self.engine.hold_cached(holding):
            assert holding.held_kv.committed_len > 0
            self.cache.pin(holding.held_kv)
            self.cache.unpin(holding.held_kv)
            self.seen["held"] += 1
        else:
            assert holding.kv is None
            self.seen["found nothing"] += 1

    @precondition(lambda self: self.submitted and len(self._alive()) < 3)
    @rule(data=st.data())
    def reserve_returned(self, data):
        holding = self._new(self._tokens(data))
        if not self.engine.reserve_returned(holding):
            assert holding.kv is None
            self.seen["no room"] += 1
            return
        start = holding.held_kv.committed_len
        slots = self.cache.slots(holding.held_kv, start, holding.prompt_len)
        self.bench.runner.receive(slots, holding.prompt[start:], start)
        self.seen["filled"] += 1

    @precondition(lambda self: self._alive())
    @rule(data=st.data(), arrives=st.sampled_from((True, True, False)))
    def end_return(self, data, arrives):
        holding = data.draw(st.sampled_from(self._alive()), label="holding")
        if not arrives or holding.stage is Stage.HELD:
            self.engine.end(holding)
            return
        self.cache.commit(holding.held_kv, holding.prompt_len)
        self.cache.adopt(holding.held_kv)
        self.engine.keep_returned(holding)
        self.seen["kept"] += 1

    def _offer(self, request: Request) -> None:
        scheduler, gave_way = self.engine.scheduler, self.seen["gave way"]
        lacks_room = scheduler._has_places(request) and not scheduler._yields(request)
        super()._offer(request)
        if request.stage is Stage.EXPECTED and lacks_room:
            assert not self._alive(), "somebody was refused for what nobody waits for"
        self.seen["gave way to a handoff"] += self.seen["gave way"] > gave_way

    def _step(self) -> bool:
        counters = self.engine.scheduler.counters
        retractions, sat_out = counters["retractions"], counters["steps_sat_out"]
        gave_way = self.seen["gave way"]
        computed = super()._step()
        if counters["retractions"] > retractions or counters["steps_sat_out"] > sat_out:
            assert not self._alive(), "somebody had to go for what nobody waits for"
        self.seen["gave way to a step"] += self.seen["gave way"] > gave_way
        return computed

    @invariant()
    def nobody_waits_for_a_holding(self):
        """What is assured fits beside the KV of holdings as well: each came in by the same test."""
        horizon, page = self.engine.scheduler.horizon, self.page_size
        held: set[int] = set()
        missing = 0
        for request in (*self.requests, *self.holdings):
            kv = request.kv
            assured = request.arrival <= horizon and request.give_way is None
            if kv is None or (request.is_retractable and not assured):
                continue
            held |= set(self.cache.slots(kv, 0, kv.allocated_len).tolist())
            if request.give_way is not None:
                assert kv.allocated_len >= min(kv.committed_len, request.prompt_len)
            elif not assured and not request.prefill_only:
                missing += kv.loading_len
            else:
                missing += max(0, self._needed(request) - kv.allocated_len)
        assert len(held) + missing <= self.cache.num_slots, f"pages of {page}"

    def _end_everything(self) -> None:
        """Everybody ends while they are there; they end afterwards."""
        super()._end_everything()
        for holding in self._alive():
            self.engine.end(holding)


def _run(page_size: int, index: str, examples: int, seed: int | None) -> Counter[str]:
    seen: Counter[str] = Counter()
    run_machine(
        lambda: HoldingMachine(page_size, index, seen), examples=examples, steps=STEPS, seed=seed
    )
    return seen


CASES = [(1, "radix"), (4, "radix"), (16, "radix"), (1, "tiers"), (4, "tiers")]


@pytest.mark.parametrize(("page_size", "index"), CASES)
def test_what_goes_back_is_in_nobodys_way(page_size, index):
    seen: Counter[str] = Counter()
    for seed in CI_SEEDS:
        seen += _run(page_size, index, CI_EXAMPLES, seed)
        if set(+seen) >= WORTH_SEEING:
            return
    raise AssertionError(f"the sample never saw {WORTH_SEEING - set(+seen)}")


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "index"), CASES)
def test_what_goes_back_is_in_nobodys_way_in_many_more_runs(page_size, index):
    wanted = WORTH_SEEING | WORTH_SEEING_OF_MANY
    seen: Counter[str] = Counter()
    for _ in range(SLOW_ROUNDS_MAX):
        seen += _run(page_size, index, SLOW_EXAMPLES, None)
        if set(+seen) >= wanted:
            return
    raise AssertionError(f"the sample never saw {wanted - set(+seen)}")
