"""The asyncio side of supervision, over members that are no processes."""

from __future__ import annotations

import asyncio

import pytest

from cluster import cluster_state as state_module
from cluster import member_state
from cluster import supervisor as supervisor_module
from cluster.launcher import StartRefused
from cluster.member_state import Phase
from cluster.members import WorkerSpec
from cluster.operations import Operations
from kvferry.errors import InvalidInput, UnknownWorker, WorkerUnavailable
from kvferry.ids import WorkerId
from kvferry.membership import Role
from tests.support.fake_members import DECODE, LONG_S, ROUTER, poll, supervise, until


def test_a_cluster_becomes_complete_and_its_router_learns_the_workers():
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        router = launcher.members["router-0", 1]
        membership = await router.memberships.get()
        if not membership.workers:  # the router was there before the worker
            membership = await router.memberships.get()
        assert membership == supervisor.view().membership

    supervise(scenario)


def test_workers_count_as_reached_when_the_router_says_so():
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        router = launcher.members["router-0", 1]
        assert await supervisor.unreached_workers() == ("decode-0",)
        router.reached = ("decode-0", "of another membership")
        assert await supervisor.unreached_workers() == ()
        router.die()  # not yet noticed
        assert await supervisor.unreached_workers() == ("decode-0",)

    supervise(scenario)


def test_a_dead_worker_leaves_at_once_and_comes_back_as_another():
    async def scenario(supervisor, launcher):
        before = await until(supervisor, lambda view: view.is_complete)
        launcher.members["decode-0", 1].die()
        gone = await until(supervisor, lambda view: not view.membership.workers)
        assert gone.membership.version > before.membership.version
        back = await until(supervisor, lambda view: view.is_complete)
        assert back.membership.workers[0].incarnation == 2
        assert launcher.members["router-0", 1].kills == 0

    supervise(scenario)


def test_a_dead_router_comes_back_with_the_same_port_and_the_current_membership():
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        launcher.members["router-0", 1].die()
        await until(supervisor, lambda view: not view.routers)
        await until(supervisor, lambda view: view.is_complete)
        router = launcher.members["router-0", 2]
        assert router.spec.port == 7000
        assert await router.memberships.get() == supervisor.view().membership

    supervise(scenario)


def test_a_refusal_to_start_is_reported_with_its_reason():
    async def scenario(supervisor, launcher):
        view = await until(supervisor, lambda view: view.reports[0].failed_for_good)
        assert view.reports[0].last_end == "cache.memory_bytes: too small"
        await launcher.members["decode-0", 1].killed.wait()

    refusal = StartRefused("cache.memory_bytes: too small", for_good=True)
    supervise(scenario, specs=(DECODE,), refusal=refusal)


def test_stop_asks_every_member_and_ends_its_process():
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)

    supervisor, launcher = supervise(scenario)
    assert {(member.stops, member.kills) for member in launcher.members.values()} == {(1, 1)}
    assert {report.phase for report in supervisor.view().reports} == {Phase.STOPPED}


def test_a_member_that_is_gone_already_does_not_keep_the_others_from_stopping():
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)

    _, launcher = supervise(scenario, stop_hangs=True)
    assert [member.kills for member in launcher.members.values()] == [1, 1]


def test_routers_have_their_grace_and_workers_have_none(monkeypatch):
    monkeypatch.setattr(supervisor_module, "STOP_TIMEOUT_S", 0.0)

    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)

    _, launcher = supervise(scenario, router_grace_s=LONG_S)
    assert launcher.log == ["router-0 stops", "router-0 has stopped", "decode-0 stops"]
    assert [member.kills for member in launcher.members.values()] == [1, 1]


def test_waiting_for_a_change_ends_without_one():
    async def scenario(supervisor, launcher):
        view = await until(supervisor, lambda view: view.is_complete)
        later = await supervisor.wait_for_change(view.changes + 100, timeout_s=0.01)
        assert later.is_complete

    supervise(scenario)


@pytest.fixture
def quick_health(monkeypatch):
    monkeypatch.setattr(supervisor_module, "HEALTH_INTERVAL_S", 0.01)


def test_a_member_that_says_it_is_dead_is_killed_and_launched_again(quick_health):
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        launcher.members["decode-0", 1].alive = False
        gone = await until(supervisor, lambda view: not view.membership.workers)
        assert gone.reports[1].last_end == "the engine has stopped"
        await until(supervisor, lambda view: view.is_complete)
        assert launcher.members["decode-0", 1].kills == 1
        assert launcher.members["decode-0", 2].kills == 0

    supervise(scenario)


def test_routers_have_stopped_before_workers_are_asked_to(quick_health):
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)

    _, launcher = supervise(scenario)
    assert launcher.log == [
        "router-0 stops",
        "router-0 has stopped",
        "decode-0 stops",
        "decode-0 has stopped",
    ]


def test_a_router_that_stops_is_not_told_that_its_workers_are_gone():
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)

    _, launcher = supervise(scenario)
    told = launcher.members["router-0", 1].memberships
    last = None
    while not told.empty():
        last = told.get_nowait()
    assert last is None or last.workers


def test_a_launch_that_fails_is_reported_and_tried_again():
    async def scenario(supervisor, launcher):
        launcher.failures["decode-0", 1] = OSError("no more processes")
        view = await until(supervisor, lambda view: view.reports[1].last_end)
        assert "no more processes" in view.reports[1].last_end
        await until(supervisor, lambda view: view.is_complete)

    supervise(scenario)


def test_a_kill_that_fails_does_not_end_supervision():
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        first = launcher.members["decode-0", 1]
        first.kill_error = RuntimeError("Ray is confused")
        first.die()
        gone = await until(supervisor, lambda view: not view.membership.workers)
        assert gone.reports[1].last_end == "killed"
        await until(supervisor, lambda view: view.is_complete)
        assert launcher.members["decode-0", 2].kills == 0

    supervise(scenario)


def test_a_fault_of_ours_in_a_watcher_ends_supervision_visibly(monkeypatch):
    def fail(*_arguments, **_named):
        raise AssertionError("a bug of ours")

    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        monkeypatch.setattr(supervisor.state, "ended", fail)
        launcher.members["decode-0", 1].die()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.2)

    with pytest.raises(AssertionError, match="a bug of ours"):
        supervise(scenario)


OTHER = WorkerSpec(WorkerId("decode-1"), Role.DECODE, 1.0, 0.0, 1)
TWO = (ROUTER, DECODE, OTHER)


@pytest.fixture
def quick_drain(monkeypatch):
    monkeypatch.setattr(supervisor_module, "_DRAIN_POLL_S", 0.005)


def membership_of(router):
    """The last one that this router was told of."""
    last = None
    while not router.memberships.empty():
        last = router.memberships.get_nowait()
    return last


def test_a_worker_is_ended_when_nobody_needs_it_any_more(quick_drain, quick_health):
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        router, leaving = launcher.members["router-0", 1], launcher.members["decode-0", 1]
        router.works_at["decode-0"] = True
        removal = asyncio.create_task(Operations(supervisor).remove_worker("decode-0", LONG_S))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(removal), 0.05)
        draining = {w.worker_id: w.is_draining for w in membership_of(router).workers}
        assert draining == {"decode-0": True, "decode-1": False}
        assert leaving.stops == 0
        router.works_at.clear()
        assert await removal
        assert (leaving.stops, leaving.kills) == (1, 1)
        # Not by its watcher, to whom a member that stops looks like one that died.
        assert leaving.log == ["decode-0 stops", "decode-0 has stopped"]
        assert [report.name for report in supervisor.view().reports] == ["router-0", "decode-1"]
        assert ("decode-0", 2) not in launcher.members

    supervise(scenario, specs=TWO)


def test_a_drain_has_a_deadline(quick_drain):
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        launcher.members["router-0", 1].works_at["decode-0"] = True
        assert not await Operations(supervisor).remove_worker("decode-0", 0.02)
        assert launcher.members["decode-0", 1].stops == 1

    supervise(scenario, specs=TWO)


def test_a_router_that_does_not_know_yet_is_waited_for(quick_drain, monkeypatch):
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        router = launcher.members["router-0", 1]
        heard = asyncio.Event()

        async def slow(membership):
            await heard.wait()

        monkeypatch.setattr(router, "set_membership", slow)
        removal = asyncio.create_task(Operations(supervisor).remove_worker("decode-0", LONG_S))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(removal), 0.05)
        heard.set()
        assert await removal

    supervise(scenario, specs=TWO)


def test_a_worker_that_dies_while_it_drains_is_not_started_again(quick_drain):
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        launcher.members["router-0", 1].works_at["decode-0"] = True
        removal = asyncio.create_task(Operations(supervisor).remove_worker("decode-0", LONG_S))
        await until(supervisor, lambda view: any(w.is_draining for w in view.membership.workers))
        launcher.members["decode-0", 1].die()
        assert not await removal
        assert supervisor.view().is_complete
        assert ("decode-0", 2) not in launcher.members

    supervise(scenario, specs=TWO)


def test_workers_are_added_and_change_their_role():
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        assert await Operations(supervisor).add_worker(Role.DECODE) == "decode-1"
        await until(supervisor, lambda view: len(view.membership.workers) == 2)
        await Operations(supervisor).set_role("decode-0", Role.PREFILL)
        roles = {w.worker_id: w.role for w in supervisor.view().membership.workers}
        assert roles == {"decode-0": Role.PREFILL, "decode-1": Role.DECODE}
        assert launcher.members["decode-0", 1].stops == 0
        with pytest.raises(InvalidInput):
            await Operations(supervisor).remove_worker("decode-1", LONG_S)
        with pytest.raises(UnknownWorker):
            await Operations(supervisor).remove_worker("decode-7", LONG_S)

    supervise(scenario)


def test_a_cluster_that_stops_takes_no_orders_and_breaks_off_a_drain(quick_drain):
    removals = []

    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        launcher.members["router-0", 1].works_at["decode-0"] = True
        removals.append(
            asyncio.create_task(Operations(supervisor).remove_worker("decode-0", LONG_S))
        )
        await until(supervisor, lambda view: any(w.is_draining for w in view.membership.workers))
        await supervisor.stop()
        with pytest.raises(WorkerUnavailable, match="the cluster is stopping"):
            await removals[0]
        with pytest.raises(WorkerUnavailable, match="the cluster is stopping"):
            await Operations(supervisor).add_worker(Role.DECODE)

    _, launcher = supervise(scenario, specs=TWO)
    assert {member.kills for member in launcher.members.values()} == {1}


@pytest.fixture
def quick_unreached(quick_health, monkeypatch):
    monkeypatch.setattr(supervisor_module, "_UNREACHED_POLL_S", 0.005)


@pytest.mark.usefixtures("quick_unreached")
def test_members_that_are_cut_off_and_come_back_are_left_alone():
    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        worker, router = launcher.members["decode-0", 1], launcher.members["router-0", 1]
        worker.is_cut_off = router.is_cut_off = True
        lost = supervisor.state.members
        await poll(lambda: lost["decode-0"].is_unreached and lost["router-0"].is_unreached)
        supervisor.state.set_role("decode-0", Role.BOTH)  # The router learns it when it is back.
        await supervisor.announce()
        worker.is_cut_off = router.is_cut_off = False
        await poll(lambda: not (lost["decode-0"].is_unreached or lost["router-0"].is_unreached))
        while (await router.memberships.get()) != supervisor.view().membership:
            pass
        assert supervisor.view().membership.workers[0].incarnation == 1
        assert (worker.kills, router.kills) == (0, 0)

    supervise(scenario)


@pytest.mark.usefixtures("quick_unreached")
def test_one_that_stays_cut_off_is_replaced_and_ended(monkeypatch):
    monkeypatch.setattr(member_state, "UNREACHED_MAX_S", 0.05)

    async def scenario(supervisor, launcher):
        await until(supervisor, lambda view: view.is_complete)
        former = launcher.members["decode-0", 1]
        former.is_cut_off = True
        await until(
            supervisor,
            lambda view: [each.incarnation for each in view.membership.workers] == [2],
        )
        former.is_cut_off = False  # Whom its network brings back too late.
        await former.killed.wait()
        assert [each.incarnation for each in supervisor.view().membership.workers] == [2]
        assert launcher.members["decode-0", 2].kills == 0

    supervise(scenario)


def test_a_launch_that_is_given_up_is_ended_when_there_is_something_to_end(monkeypatch):
    monkeypatch.setattr(state_module, "WORKER_START_TIMEOUT_S", 0.05)

    async def scenario(supervisor, launcher):
        held = launcher.held["decode-0", 1] = asyncio.Event()
        await until(supervisor, lambda view: view.reports[0].launches == 2)
        await until(supervisor, lambda view: view.is_complete)
        held.set()
        await poll(lambda: ("decode-0", 1) in launcher.members)
        await launcher.members["decode-0", 1].killed.wait()
        assert launcher.members["decode-0", 2].kills == 0

    supervise(scenario, specs=(DECODE,))
