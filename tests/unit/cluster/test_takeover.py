from __future__ import annotations

import asyncio

import pytest

from cluster.cluster_record import RecordUnreadable, record_from_json
from cluster.cluster_state import ClusterState
from cluster.configurations import Configurations
from cluster.operations import Operations
from cluster.supervisor import Supervisor
from cluster.takeover import Beginning, begin
from kvferry.clock import MonotonicClock
from kvferry.errors import InvalidInput
from kvferry.membership import Role
from tests.support.fake_members import (
    BACKOFF_S,
    DECODE,
    LONG_S,
    ROUTER,
    FakeLauncher,
    MemoryStore,
    config_of,
    until,
)

CONFIG = config_of()


class Office:
    """Supervisors of one cluster, one after the other."""

    def __init__(self):
        self.launcher, self.store, self.clock = FakeLauncher(), MemoryStore(), MonotonicClock()
        self.supervisor = None
        self._run = None

    async def found(self, specs=(ROUTER, DECODE)):
        state = ClusterState(specs, BACKOFF_S, self.clock, CONFIG.workers)
        await self._begin(Beginning(state, Configurations({0: CONFIG}, 0), 1))
        await until(self.supervisor, lambda view: view.is_complete)
        await self.supervisor.recorder.save()

    async def kill(self):
        """As by SIGKILL: no task of it takes another step."""
        supervisor, self.supervisor = self.supervisor, None
        self._run.cancel()
        for task in tuple(supervisor._tasks):
            task.cancel()
        await asyncio.gather(self._run, *supervisor._tasks, return_exceptions=True)

    async def take_over(self):
        beginning = await begin(self.store.text, CONFIG, self.launcher, self.clock)
        await self._begin(beginning)

    async def _begin(self, beginning):
        self.supervisor = Supervisor(beginning, self.launcher, self.store, self.clock)
        await self.supervisor.recorder.save()
        self._run = asyncio.create_task(self.supervisor.run())
        Operations(self.supervisor).go_on()

    async def close(self):
        if self.supervisor is not None:
            await self.supervisor.stop()
            await self._run


def in_office(scenario):
    async def run():
        office = Office()
        async with asyncio.timeout(LONG_S):
            try:
                await scenario(office)
            finally:
                await office.close()

    asyncio.run(run())


def last_told(router):
    last = None
    while not router.memberships.empty():
        last = router.memberships.get_nowait()
    return last


def test_everybody_goes_on_and_versions_grow():
    async def scenario(office):
        await office.found()
        before = office.supervisor.view()
        router, worker = office.launcher.members.values()
        await office.kill()
        await office.take_over()
        await until(office.supervisor, lambda view: view.is_complete)
        assert len(office.launcher.members) == 2, "nobody was started again"
        assert (router.kills, worker.kills, worker.stops) == (0, 0, 0)
        after = office.supervisor.view()
        assert after.membership.workers == before.membership.workers
        assert after.membership.version > before.membership.version
        assert after.changes > before.changes
        await asyncio.sleep(0.05)
        assert last_told(router) == after.membership

    in_office(scenario)


def test_no_router_is_told_of_less_than_there_is():
    async def scenario(office):
        await office.found()
        router = office.launcher.members["router-0", 1]
        last_told(router)
        await office.kill()
        await office.take_over()
        await asyncio.sleep(0.05)
        while not router.memberships.empty():
            assert router.memberships.get_nowait().workers

    in_office(scenario)


def test_one_that_died_meanwhile_is_started_again_under_a_new_number():
    async def scenario(office):
        await office.found()
        await office.kill()
        office.launcher.members["decode-0", 1].die()
        await office.take_over()
        await until(office.supervisor, lambda view: view.is_complete)
        assert ("decode-0", 2) in office.launcher.members
        assert ("router-0", 2) not in office.launcher.members

    in_office(scenario)


def test_one_that_dies_later_is_noticed():
    async def scenario(office):
        await office.found()
        await office.kill()
        await office.take_over()
        office.launcher.members["decode-0", 1].die()
        await until(office.supervisor, lambda view: not view.membership.workers)
        await until(office.supervisor, lambda view: view.is_complete)

    in_office(scenario)


def test_one_that_was_being_started_is_waited_for_not_started_twice():
    async def scenario(office):
        await office.found()
        await office.kill()
        worker = office.launcher.members["decode-0", 1]
        worker.info, worker.starts = None, 0
        await office.take_over()
        await until(office.supervisor, lambda view: view.is_complete)
        assert worker.starts == 1
        assert ("decode-0", 2) not in office.launcher.members

    in_office(scenario)


def test_what_nobody_knows_is_ended():
    async def scenario(office):
        await office.found()
        stranger = await office.launcher.launch(DECODE, 7, CONFIG)
        del office.launcher.members["decode-0", 7]
        office.launcher.members["decode-9", 1] = stranger
        await office.kill()
        await office.take_over()
        await stranger.killed.wait()
        assert office.launcher.members["decode-0", 1].kills == 0

    in_office(scenario)


def test_orders_are_remembered():
    async def scenario(office):
        await office.found()
        operations = Operations(office.supervisor)
        assert await operations.add_worker(Role.DECODE) == "decode-1"
        await until(office.supervisor, lambda view: view.is_complete)
        await operations.set_role("decode-0", Role.BOTH)
        assert await operations.remove_worker("decode-1", 0.0) in (True, False)
        await office.kill()
        await office.take_over()
        await until(office.supervisor, lambda view: view.is_complete)
        (info,) = office.supervisor.view().membership.workers
        assert (info.worker_id, info.role) == ("decode-0", Role.BOTH)
        assert await Operations(office.supervisor).add_worker(Role.DECODE) == "decode-2"

    in_office(scenario)


def test_a_drain_goes_on():
    async def scenario(office):
        await office.found()
        operations = Operations(office.supervisor)
        await operations.add_worker(Role.DECODE)
        await until(office.supervisor, lambda view: view.is_complete)
        router = office.launcher.members["router-0", 1]
        router.works_at["decode-0"] = True
        order = asyncio.create_task(operations.remove_worker("decode-0", LONG_S))
        await until(
            office.supervisor, lambda view: any(w.is_draining for w in view.membership.workers)
        )
        await asyncio.sleep(0.01)
        order.cancel()
        await office.kill()
        await office.take_over()
        view = office.supervisor.view()
        assert {w.worker_id: w.is_draining for w in view.membership.workers} == {
            "decode-0": True,
            "decode-1": False,
        }
        with pytest.raises(InvalidInput, match="is being taken out already"):
            await Operations(office.supervisor).remove_worker("decode-0", 1.0)
        router.works_at.clear()
        await until(office.supervisor, lambda view: len(view.membership.workers) == 1)
        assert office.launcher.members["decode-0", 1].stops == 1

    in_office(scenario)


def test_a_cluster_that_was_stopped_stays_so():
    async def scenario(office):
        await office.found()
        await office.supervisor.stop()
        await office._run
        office.supervisor = None
        await office.take_over()
        assert office.supervisor.view().reports == ()

    in_office(scenario)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99}', '{"format": 1}'])
def test_a_record_that_cannot_be_read_is_said_to_be(text):
    with pytest.raises(RecordUnreadable):
        record_from_json(text)
