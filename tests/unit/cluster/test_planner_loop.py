"""The planner at work beside a router: orders, failures, dry runs."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cluster.commands.plan import plan_lines
from cluster.planner import AddWorker, Decision, Plan, RemoveWorker, SwitchRole
from cluster.planner_loop import PlannerLoop
from kvferry.clock import ManualClock
from kvferry.config import ClusterConfig
from kvferry.errors import InvalidInput, WorkerUnavailable
from kvferry.ids import WorkerId
from kvferry.membership import Role
from kvferry.planner_config import PlannerConfig, PlannerMode
from kvferry.tracing_config import TracingConfig
from router.request_log import RequestLog

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence


def on_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(test(*given, **named))

    return run


SWITCH = SwitchRole(WorkerId("decode-1"), Role.PREFILL, "decode-1 -> prefill: prompts need more")


class Control:
    """Takes every order, or fails as told."""

    def __init__(self) -> None:
        self.orders: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.drain = asyncio.Event()

    async def add_worker(self, role: Role) -> str:
        self._note("add", role)
        return "decode-9"

    async def set_role(self, worker_id: str, role: Role) -> None:
        self._note("switch", worker_id, role)

    async def remove_worker(self, worker_id: str, drain_s: float) -> bool:
        self._note("remove", worker_id, drain_s)
        await self.drain.wait()
        return True

    def _note(self, *order: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.orders.append(order)


class Bench:
    """A loop whose planner says what it is told."""

    def __init__(self, mode: PlannerMode, decisions: Sequence[Decision] = (SWITCH,)) -> None:
        self.control = Control()
        self.clock = ManualClock()
        self.asked: list[int] = []
        config = ClusterConfig(planner=PlannerConfig(mode=mode, interval_s=0.01))
        router: Any = SimpleNamespace(
            log=RequestLog(self.clock, TracingConfig()), worker_summaries=list
        )
        self.loop = PlannerLoop(config, router, self.control, self.clock, self.asked.append)
        self.looks = 0
        self.fourth = asyncio.Event()
        self.decisions = tuple(decisions)
        self.loop._planner = self  # type: ignore[assignment]

    def plan(self, seen: Any) -> Plan:
        self.looks += 1
        if self.looks == 4:
            self.fourth.set()
        self.starting = seen.starting
        if self.looks == 2:
            raise RuntimeError("a bug of ours")
        return Plan(self.clock.now(), self.decisions, "because", None)


@on_loop
async def test_what_is_decided_is_ordered() -> None:
    bench = Bench(PlannerMode.ON)
    entry = await bench.loop.look()
    assert bench.control.orders == [("switch", "decode-1", Role.PREFILL)]
    assert entry.outcomes == ["done"]


@on_loop
async def test_a_dry_run_orders_nothing_and_tells_what_it_would() -> None:
    bench = Bench(PlannerMode.DRY_RUN)
    entry = await bench.loop.look()
    assert bench.control.orders == []
    assert entry.outcomes == ["not carried out"]
    lines = list(plan_lines(bench.loop.plans(5), explain=True))
    assert lines[0] == "planner: dry_run"
    assert lines[1].endswith("because")
    assert "switch decode-1 -> prefill: not carried out" in lines[2]


@pytest.mark.parametrize(
    "failure", [InvalidInput("worker_id", "is the only one"), WorkerUnavailable("gone")]
)
@on_loop
async def test_an_order_that_is_refused_is_told_and_the_next_one_goes_out(
    failure: Exception,
) -> None:
    bench = Bench(PlannerMode.ON, [SWITCH, SWITCH])
    bench.control.failure = failure
    entry = await bench.loop.look()
    assert entry.outcomes == [f"failed: {failure}"] * 2


@on_loop
async def test_a_worker_that_was_added_is_waited_for_and_machines_are_asked_for() -> None:
    bench = Bench(PlannerMode.ON, [AddWorker(Role.DECODE, "no split will do")])
    entry = await bench.loop.look()
    assert entry.outcomes == ["decode-9 is being started"]
    assert bench.asked == [1]
    bench.decisions = ()
    bench.looks = 5
    await bench.loop.look()
    assert bench.starting == 1
    bench.clock.advance(1000.0)
    await bench.loop.look()
    assert bench.starting == 0


@on_loop
async def test_a_drain_keeps_nobody_waiting() -> None:
    bench = Bench(PlannerMode.ON, [RemoveWorker(WorkerId("decode-1"), "fewer would do"), SWITCH])
    entry = await bench.loop.look()
    assert entry.outcomes == ["under way", "done"]
    bench.control.drain.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert entry.outcomes == ["done", "done"]
    assert bench.asked == [0]
    await bench.loop.stop()


@on_loop
async def test_a_look_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(PlannerMode.ON)
    bench.loop.start()
    await asyncio.wait_for(bench.fourth.wait(), 5)
    await bench.loop.stop()
    assert "a look of the planner failed" in caplog.text
    seen = bench.looks
    await asyncio.sleep(0.03)
    assert bench.looks == seen


@on_loop
async def test_the_last_looks_are_told_the_latest_first() -> None:
    bench = Bench(PlannerMode.DRY_RUN)
    for number in range(4):
        bench.looks = 10
        bench.decisions = (replace(SWITCH, reason=str(number)),)
        await bench.loop.look()
        bench.clock.advance(2.0)
    told = bench.loop.plans(2)
    assert [plan.steps[0].reason for plan in told.plans] == ["3", "2"]
    assert [plan.age_s for plan in told.plans] == [2.0, 4.0]
    assert len(bench.loop.plans(0).plans) == 4
