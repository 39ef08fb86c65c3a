"""Requests that only hold KV: they come in where there is room, and go before others have to."""

from __future__ import annotations

import numpy as np
import pytest

from engine.auditor import Auditor, RunAudit
from engine.holding import new_holding
from engine.request import Request, Stage
from kvferry.cache_key import CacheUse
from kvferry.config import SchedulerConfig
from kvferry.errors import InvalidInput
from kvferry.ids import Attempt, ExtraKey, RequestId
from tests.support.digest_model import answer
from tests.support.engine_bench import EngineBench

PROMPT = list(range(20, 36))
OTHER = list(range(60, 76))
USE = CacheUse(ExtraKey(""))


class Bench(EngineBench):
    """A page is 4 tokens. `gave_way` has what was ended for others."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.gave_way: list[Request] = []

    def holding(self, tokens: list[int]) -> Request:
        def give_way() -> None:
            self.gave_way.append(made)
            self.engine.end(made)

        ids = np.asarray(tokens, dtype=np.int32)
        made = new_holding(RequestId("back"), Attempt(1), ids, USE, give_way)
        return made

    def held(self, tokens: list[int] = PROMPT) -> Request:
        """What a request with this prompt leaves in the cache, held."""
        self.submit("before", tokens, max_tokens=1)
        self.run()
        holding = self.holding([*tokens, 1])
        assert self.engine.hold_cached(holding)
        return holding

    def filling(self, tokens: list[int] = PROMPT) -> Request:
        holding = self.holding(tokens)
        assert self.engine.reserve_returned(holding)
        return holding


def _optimist(**options) -> SchedulerConfig:
    return SchedulerConfig(output_reserve=0.0, **options)


def test_it_holds_what_is_cached_and_nothing_else():
    bench = Bench()
    holding = bench.held()
    assert holding.stage is Stage.HELD
    assert holding.held_kv.committed_len == holding.held_kv.allocated_len == 16
    assert bench.engine.scheduler.holding == 1
    # No step takes part in it, and it is no load.
    assert not bench.engine.step()
    assert bench.engine.scheduler.running == bench.engine.scheduler.waiting == 0
    bench.engine.end(holding)
    bench.assert_idle()


def test_where_nothing_is_cached_there_is_nothing_to_hold():
    bench = Bench()
    holding = bench.holding(PROMPT)
    assert not bench.engine.hold_cached(holding)
    assert holding.stage is Stage.ENDED
    bench.assert_idle()


def test_what_could_never_fit_is_refused():
    bench = Bench(num_slots=32)
    with pytest.raises(InvalidInput):
        bench.engine.reserve_returned(bench.holding(list(range(20, 60))))
    bench.assert_idle()


def test_an_audit_finds_both_kinds_in_order():
    bench = Bench()
    bench.held()
    bench.filling(OTHER)
    reports = []
    assert Auditor(bench.engine, bench.engine.clock, 0).handle(RunAudit(reports.append))
    assert reports[0].violations == ()


@pytest.mark.parametrize("kind", ["held", "filling"])
def test_it_goes_before_a_running_request_lacks_a_slot(kind):
    # 32 slots: 16 of the holding, 16 for a request that was promised just that and grows.
    bench = Bench(num_slots=32, scheduler=_optimist())
    holding = bench.held() if kind == "held" else bench.filling()
    bench.submit("grows", OTHER[:14], max_tokens=12)
    bench.engine.step()
    assert holding.stage is not Stage.ENDED, "there was room for both"
    bench.run()
    assert bench.gave_way == [holding]
    counters = bench.engine.scheduler.counters
    assert (counters["holdings_given_up"], counters["retractions"]) == (1, 0)
    assert counters["steps_sat_out"] == 0
    assert bench.recorder.told["grows"] == answer(OTHER[:14], 12)
    bench.assert_idle()


def test_it_goes_before_anyone_is_retracted():
    bench = Bench(num_slots=48, scheduler=_optimist())
    holding = bench.filling()
    for name, prompt in (("old", OTHER[:12]), ("young", PROMPT[:12])):
        bench.submit(name, prompt, max_tokens=8)
    bench.run()
    assert bench.gave_way == [holding]
    assert bench.engine.scheduler.counters["retractions"] == 0
    assert bench.recorder.told["young"] == answer(PROMPT[:12], 8)


def test_it_goes_before_the_offer_of_a_handoff_is_refused():
    bench = Bench(num_slots=32, scheduler=_optimist())
    holding = bench.filling()
    request = bench.request("in", list(range(100, 120)), max_tokens=4)
    bench.engine.submit_inbound(request)
    assert bench.engine.next_expected() is request
    assert bench.gave_way == [holding]
    late = bench.filling([1, 2, 3, 4])
    assert bench.engine.reserve_inbound(request)
    assert late.stage is Stage.INBOUND, "there was room for both"


def test_a_row_is_given_up_as_well():
    bench = Bench(rows=1)
    holding = bench.held()
    bench.submit("r", OTHER, max_tokens=2)
    bench.run()
    assert bench.gave_way == [holding]
    assert bench.recorder.told["r"] == answer(OTHER, 2)


def test_it_takes_nobodys_place_in_the_batch():
    bench = Bench(scheduler=_optimist(running_max=1))
    holding = bench.filling()
    bench.submit("r", OTHER, max_tokens=2)
    bench.run()
    assert bench.recorder.told["r"] == answer(OTHER, 2)
    assert not bench.gave_way
    bench.engine.end(holding)
    bench.assert_idle()


def test_it_takes_no_room_that_is_kept_for_somebody():
    bench = Bench(num_slots=28, scheduler=_optimist())
    request = bench.request("in", OTHER, max_tokens=4)
    bench.engine.submit_inbound(request)
    assert bench.engine.next_expected() is request
    room = bench.engine.scheduler.room
    assert room == 12
    assert not bench.engine.reserve_returned(bench.holding(PROMPT))
    assert bench.engine.reserve_returned(bench.holding(PROMPT[:room]))
    assert bench.engine.reserve_inbound(request)
