"""Who is given requests while workers come, drain, die, change their role and fall silent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.accounts import KvAccounts, WorkerLoad
from kvferry.errors import DeadlineExceeded, WorkerUnavailable
from kvferry.ids import Incarnation, WorkerId
from kvferry.kv_events import BlockHash, BlocksStored, KvEventBatch
from kvferry.limits import KV_EVENTS_SILENCE_MAX_S
from kvferry.membership import Membership, Role, WorkerInfo
from router.fleet import Fleet
from router.policy import Route
from router.worker_client import WorkerStatus
from tests.support.autojump import LoopClock, run_jumping

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from kvferry.errors import KvferryError

HELD_BLOCKS = tuple(map(BlockHash, (1, 2, 3)))
PROMPT = np.array(HELD_BLOCKS, dtype=np.uint64)
BLOCK_TOKENS = 16


def worker(name: str, incarnation: int = 1, role: Role = Role.BOTH) -> WorkerInfo:
    return WorkerInfo(WorkerId(name), role, Incarnation(incarnation), f"{name}:{incarnation}")


@dataclass(eq=False)
class FakeClient:
    """A worker that holds `PROMPT`, answers its status, and closes when it is let."""

    info: WorkerInfo
    waiting_tokens: int = 0
    aborted: list[KvferryError] = field(default_factory=list)
    subscriptions: int = 0
    closed: bool = False
    failure: KvferryError | None = None

    def __post_init__(self) -> None:
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.is_mute = False

    async def status(self, timeout_s: float) -> WorkerStatus:
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        accounts = KvAccounts(100, 0, 0, 0, 0, 100, 0, 0, 8)
        load = WorkerLoad(waiting_tokens=self.waiting_tokens)
        return WorkerStatus(self.info.incarnation, load, accounts, None, 1, {})

    async def kv_events(self) -> AsyncGenerator[KvEventBatch, None]:
        self.subscriptions += 1
        held = (BlocksStored(HELD_BLOCKS),)
        yield KvEventBatch(self.info.worker_id, self.info.incarnation, 0, True, held)
        while True:
            await asyncio.sleep(0.01)
            if not self.is_mute:
                yield KvEventBatch(self.info.worker_id, self.info.incarnation, 0, False, ())

    def abort_streams(self, error: KvferryError) -> None:
        self.aborted.append(error)

    async def close(self) -> None:
        await self.may_close.wait()
        self.closed = True


class Bench:
    """A fleet and the clients it made."""

    def __init__(self, status_interval_s: float) -> None:
        self.clients: list[FakeClient] = []
        self.version = 0
        self.fleet = Fleet(
            clock=LoopClock(),
            block_tokens=BLOCK_TOKENS,
            status_interval_s=status_interval_s,
            connect=self.connect,
        )

    def connect(self, info: WorkerInfo) -> FakeClient:
        self.clients.append(FakeClient(info))
        return self.clients[-1]

    async def members(self, *infos: WorkerInfo) -> None:
        self.version += 1
        await self.fleet.set_membership(Membership(self.version, infos))

    def hits(self) -> dict[WorkerInfo, int]:
        """Who may decode, and what it holds."""
        workers = self.fleet.view(PROMPT).decode
        return dict(zip(workers.roster.infos, workers.hit_tokens.tolist(), strict=True))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - any condition, so there is no event
                await asyncio.sleep(0.001)


def run(test: Callable[[Bench], Awaitable[None]], status_interval_s: float = 0.02) -> None:
    async def main() -> None:
        bench = Bench(status_interval_s)
        try:
            async with asyncio.timeout(60):
                await test(bench)
        finally:
            for client in bench.clients:
                client.may_close.set()
                client.may_answer.set()
            await bench.fleet.stop()

    run_jumping(main())


HELD = len(PROMPT) * BLOCK_TOKENS


def test_nobody_who_died_is_given_anything_however_long_the_end_of_another_takes() -> None:
    async def test(bench: Bench) -> None:
        a, b, c = worker("a"), worker("b"), worker("c")
        await bench.members(a, b, c)
        await bench.until(lambda: bench.hits() == {a: HELD, b: HELD, c: HELD})
        for client in bench.clients:
            client.may_close.clear()
        leaving = asyncio.create_task(bench.members(c))
        await asyncio.sleep(0)
        assert bench.hits() == {c: HELD}
        assert [len(client.aborted) for client in bench.clients] == [1, 1, 0]
        assert isinstance(bench.clients[0].aborted[0], WorkerUnavailable)
        # Nor does news of the next death wait for it.
        last = asyncio.create_task(bench.members())
        await asyncio.sleep(0)
        assert bench.hits() == {}
        assert not leaving.done()
        for client in bench.clients:
            client.may_close.set()
        await asyncio.gather(leaving, last)
        assert all(client.closed for client in bench.clients)

    run(test)


def test_a_new_incarnation_has_nothing_of_the_old_one() -> None:
    async def test(bench: Bench) -> None:
        old, new = worker("a"), worker("a", incarnation=2)
        await bench.members(old)
        await bench.until(lambda: bench.hits() == {old: HELD})
        first = bench.clients[0]
        # An answer of the old process is under way when the new one takes its name.
        first.waiting_tokens = 1000
        first.may_answer.clear()
        late = asyncio.create_task(bench.fleet.recheck([old.worker_id]))
        await asyncio.sleep(0)
        first.may_close.clear()
        changing = asyncio.create_task(bench.members(new))
        await bench.until(lambda: new in bench.hits())
        first.may_answer.set()
        await late
        assert bench.fleet.view(PROMPT).decode.loads.prefill_tokens == [0]
        await bench.until(lambda: bench.hits() == {new: HELD})
        first.may_close.set()
        await changing
        assert (first.closed, len(first.aborted)) == (True, 1)

    run(test)


def test_a_worker_that_drains_keeps_its_streams_and_is_given_nothing() -> None:
    async def test(bench: Bench) -> None:
        a, b = worker("a"), worker("b")
        await bench.members(a, b)
        await bench.until(lambda: bench.hits() == {a: HELD, b: HELD})
        draining = replace(a, is_draining=True)
        await bench.members(draining, b)
        assert bench.hits() == {b: HELD}
        assert not bench.clients[0].aborted
        assert bench.fleet.client(a.worker_id) is bench.clients[0]
        summary = next(s for s in bench.fleet.summaries() if s.info == draining)
        assert summary.is_reachable
        assert (summary.indexed_blocks, summary.index.is_known) == (0, False)
        assert bench.fleet.index_reports()["decode"].workers == 1
        # It may be kept after all.
        await bench.members(a, b)
        await bench.until(lambda: bench.hits() == {a: HELD, b: HELD})
        await bench.members(b)
        assert (len(bench.clients[0].aborted), bench.clients[0].closed) == (1, True)

    run(test)


def test_capacity_follows_what_is_dispatched_reported_and_who_is_there() -> None:
    async def test(bench: Bench) -> None:
        await bench.members(worker("p", role=Role.PREFILL), worker("d", role=Role.DECODE))
        p, d = (client.info for client in bench.clients)
        idle = bench.fleet.capacity(running_max=8)
        assert (idle.places, idle.kv_tokens, idle.backlog_tokens) == (8, 100, 0)
        await asyncio.sleep(0.001)  # What is sent when a status call begins may be reported.
        ticket = bench.fleet.dispatch(Route(d, p, 30, 1.0), kv_tokens=40, sequences=1)
        assert bench.fleet.capacity(running_max=8).backlog_tokens == 30
        bench.fleet.end(ticket)
        assert bench.fleet.capacity(running_max=8).backlog_tokens == 0
        bench.clients[0].waiting_tokens = 70
        await bench.fleet.recheck([p.worker_id])
        assert bench.fleet.capacity(running_max=8).backlog_tokens == 70
        # Without a worker for prompts whoever decodes computes them.
        await bench.members(d)
        assert bench.fleet.capacity(running_max=8).backlog_tokens == 0
        await bench.members()
        assert bench.fleet.capacity(running_max=8).places == 0

    run(test)


def test_the_only_worker_is_asked_while_it_is_late_and_no_longer() -> None:
    async def test(bench: Bench) -> None:
        a = worker("a")
        await bench.members(a)
        await bench.until(lambda: bench.hits() == {a: HELD})
        bench.clients[0].failure = DeadlineExceeded("late")
        await bench.fleet.recheck([a.worker_id])
        assert (bench.hits(), bench.fleet.kv_slots_max()) == ({a: HELD}, None)
        bench.clients[0].failure = WorkerUnavailable("gone")
        await bench.fleet.recheck([a.worker_id])
        assert bench.hits() == {}
        bench.clients[0].failure = None
        await bench.fleet.recheck([a.worker_id])
        assert (bench.hits(), bench.fleet.kv_slots_max()) == ({a: HELD}, 100)

    run(test, status_interval_s=3600.0)


def test_after_its_end_a_fleet_has_nobody() -> None:
    async def test(bench: Bench) -> None:
        await bench.members(worker("a"))
        await bench.until(lambda: bench.hits() == {worker("a"): HELD})
        await bench.fleet.stop()
        assert bench.hits() == {}
        assert not bench.fleet.is_ready

    run(test)


def test_a_router_whose_workers_all_drain_is_not_ready() -> None:
    async def test(bench: Bench) -> None:
        await bench.members(worker("a"))
        assert bench.fleet.is_ready
        assert bench.fleet.kv_slots_max() == 100
        await bench.members(replace(worker("a"), is_draining=True))
        assert not bench.fleet.is_ready
        assert bench.fleet.kv_slots_max() is None

    run(test)


def test_a_change_of_role_leaves_no_moment_without_a_worker() -> None:
    async def test(bench: Bench) -> None:
        a = worker("a")
        await bench.members(a)
        bench.clients[0].may_answer.clear()
        decode = replace(a, role=Role.DECODE)
        changing = asyncio.create_task(bench.members(decode))
        await asyncio.sleep(0)
        assert decode in bench.hits()
        assert bench.fleet.is_ready
        bench.clients[0].may_answer.set()
        await changing
        assert len(bench.clients) == 1

    run(test)


def test_events_that_do_not_come_are_told_and_asked_for_again() -> None:
    async def test(bench: Bench) -> None:
        await bench.members(worker("a"))
        await bench.until(lambda: bench.fleet.summaries()[0].index.is_known)
        assert bench.fleet.index_reports()["decode"].known_workers == 1
        client = bench.clients[0]
        await asyncio.sleep(1.5 * KV_EVENTS_SILENCE_MAX_S)
        assert client.subscriptions == 1
        client.is_mute = True
        await asyncio.sleep(0.9 * KV_EVENTS_SILENCE_MAX_S)
        assert client.subscriptions == 1
        age_s = bench.fleet.summaries()[0].events_age_s
        assert age_s == pytest.approx(0.9 * KV_EVENTS_SILENCE_MAX_S, abs=0.02)
        await asyncio.sleep(0.1 * KV_EVENTS_SILENCE_MAX_S + 0.02)
        assert client.subscriptions == 2
        client.is_mute = False
        await bench.until(lambda: bench.hits() == {worker("a"): HELD})

    run(test)
