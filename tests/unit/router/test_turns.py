"""One at a time, in fair order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvferry.clock import ManualClock
from router import turns as turns_module
from router.request import ServiceClass
from router.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

STANDARD, BATCH = ServiceClass.STANDARD, ServiceClass.BATCH
WEIGHTS = {ServiceClass.INTERACTIVE: 4.0, STANDARD: 2.0, BATCH: 1.0}


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.turns = Turns(WEIGHTS, self.clock)
        self.order: list[str] = []
        self.inside = 0

    def start(
        self, tenant: str, takes_s: float, times: int = 1, of: ServiceClass = STANDARD
    ) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._one(tenant, takes_s, of)) for _ in range(times)]

    async def _one(self, tenant: str, takes_s: float, of: ServiceClass) -> None:
        async with self.turns.turn(of, tenant):
            self.order.append(tenant)
            self.inside += 1
            assert self.inside == 1
            try:
                await asyncio.sleep(0)
                self.clock.advance(takes_s)
            finally:
                self.inside -= 1


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    asyncio.run(test(Bench()))


def test_tenants_have_equal_time_and_not_equal_turns() -> None:
    async def test(bench: Bench) -> None:
        tasks = bench.start("slow", 0.4, 20) + bench.start("quick", 0.1, 40)
        await asyncio.gather(*tasks)
        both = bench.order[:40]
        assert both.count("quick") == pytest.approx(32, abs=3)

    run(test)


def test_one_who_comes_later_is_not_behind_all_of_the_other() -> None:
    async def test(bench: Bench) -> None:
        tasks = bench.start("many", 1.0, 20)
        for _ in range(10):
            await asyncio.sleep(0)
        begun = len(bench.order)
        tasks += bench.start("few", 1.0, 2)
        await asyncio.gather(*tasks)
        assert 0 < begun < 15
        assert bench.order[begun : begun + 5].count("few") == 2

    run(test)


def test_turns_that_take_no_time_are_shared_too() -> None:
    async def test(bench: Bench) -> None:
        tasks = bench.start("many", 0.0, 20) + bench.start("few", 0.0, 2)
        await asyncio.gather(*tasks)
        assert bench.order[:6].count("few") == 2

    run(test)


def test_classes_have_their_weights() -> None:
    async def test(bench: Bench) -> None:
        tasks = bench.start("a", 0.1, 40) + bench.start("b", 0.1, 40, BATCH)
        await asyncio.gather(*tasks)
        assert bench.order[:30].count("a") == pytest.approx(20, abs=2)

    run(test)


@pytest.mark.parametrize("wait", range(6))
def test_whoever_is_cancelled_at_any_moment_holds_up_nobody(wait: int) -> None:
    async def test(bench: Bench) -> None:
        for victim in range(4):
            tasks = bench.start(f"t{victim}", 0.1, 4)
            for _ in range(wait):
                await asyncio.sleep(0)
            tasks[victim].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(task.cancelled() for task in tasks) <= 1
            async with asyncio.timeout(5), bench.turns.turn(STANDARD, "after"):
                pass

    run(test)


def test_tenants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "TENANTS_REMEMBERED_MAX", 10)

    async def test(bench: Bench) -> None:
        tasks = bench.start("always", 0.1, 200)
        for number in range(100):
            tasks += bench.start(f"once{number}", 0.0)
        await asyncio.gather(*tasks)
        assert not bench.turns._tenants
        for number in range(100):
            tasks = bench.start("always", 0.1) + bench.start(f"once{number}", 0.0)
            tasks += bench.start("always", 0.1)
            await tasks[1]
            assert len(bench.turns._tenants) <= 12
            await asyncio.gather(*tasks)

    run(test)
