from __future__ import annotations

import pytest

from cluster.cluster_state import ClusterState, Kill, Launch, Stop
from cluster.member_state import Phase
from cluster.members import RouterInfo, RouterSpec, WorkerSpec
from kvferry.clock import ManualClock
from kvferry.config import WorkerGroupConfig, WorkersConfig
from kvferry.errors import InvalidInput, UnknownWorker
from kvferry.ids import Incarnation, WorkerId
from kvferry.limits import (
    HEALTH_SILENCE_MAX_S,
    RESTART_BACKOFF_MAX_S,
    RESTART_BACKOFF_RESET_S,
    UNREACHED_MAX_S,
    WORKER_START_TIMEOUT_S,
)
from kvferry.membership import Role, WorkerInfo

BACKOFF_S = 0.5
ROUTER = RouterSpec("router-0", "127.0.0.1", 0, 0)
PREFILL = WorkerSpec(WorkerId("prefill-0"), Role.PREFILL, 1.0, 0.0, 1)
DECODE = WorkerSpec(WorkerId("decode-0"), Role.DECODE, 1.0, 0.0, 1)


def info(spec: WorkerSpec, incarnation: int) -> WorkerInfo:
    address = f"127.0.0.1:{1000 + incarnation}"
    return WorkerInfo(spec.worker_id, spec.role, Incarnation(incarnation), address)


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def state(clock):
    return ClusterState((ROUTER, PREFILL, DECODE), BACKOFF_S, clock)


@pytest.fixture
def running(state):
    """Everything started once, incarnations 1 and 2."""
    state.due()
    state.started(ROUTER.name, 1, RouterInfo("router-0", "127.0.0.1", 7000, 7001, pid=10))
    state.started(PREFILL.name, 1, info(PREFILL, 1))
    state.started(DECODE.name, 1, info(DECODE, 2))
    return state


def test_everything_wanted_is_launched_once(state):
    assert state.due() == [Launch(ROUTER, 1), Launch(PREFILL, 1), Launch(DECODE, 1)]
    assert state.due() == []
    assert not state.is_complete


def test_membership_grows_as_workers_start(state):
    state.due()
    assert state.membership.version == 0
    state.started(DECODE.name, 1, info(DECODE, 2))
    assert state.membership.version == 1
    state.started(PREFILL.name, 1, info(PREFILL, 1))
    assert state.membership.version == 2
    assert [worker.worker_id for worker in state.membership.workers] == ["prefill-0", "decode-0"]


def test_a_router_is_no_part_of_the_membership(running):
    assert running.membership.version == 2
    assert running.is_complete
    assert [router.port for router in running.routers()] == [7000]


def test_death_leaves_the_membership_at_once_and_touches_no_other(running):
    running.ended(PREFILL.name, 1, "killed")
    assert running.membership.version == 3
    assert [worker.worker_id for worker in running.membership.workers] == ["decode-0"]
    assert running.due() == [], "the backoff is not over"
    assert running.reports()[2].launches == 1


def test_restart_is_another_incarnation_under_a_new_version(running, clock):
    running.ended(PREFILL.name, 1, "killed")
    clock.advance(BACKOFF_S)
    assert running.due() == [Launch(PREFILL, 2)]
    running.started(PREFILL.name, 2, info(PREFILL, 3))
    assert running.membership.version == 4
    assert {worker.incarnation for worker in running.membership.workers} == {2, 3}


def test_backoff_doubles_up_to_its_bound(state, clock):
    state.due()
    waits = []
    for launch in range(1, 12):
        state.ended(DECODE.name, launch, "no luck")
        assert state.next_due() is not None
        before = clock.now()
        while not any(isinstance(effect, Launch) for effect in state.due()):
            state.ended(ROUTER.name, 1, "not of interest", for_good=True)
            state.ended(PREFILL.name, 1, "not of interest", for_good=True)
            due = state.next_due()
            assert due is not None
            clock.advance(due - clock.now())
        waits.append(clock.now() - before)
    assert waits[:4] == pytest.approx([0.5, 1.0, 2.0, 4.0])
    assert waits[-1] == pytest.approx(RESTART_BACKOFF_MAX_S)


def test_a_long_life_resets_the_backoff(running, clock):
    for launch in (1, 2, 3):
        running.ended(DECODE.name, launch, "killed")
        clock.advance(RESTART_BACKOFF_MAX_S)
        running.heard(PREFILL.name, 1)
        running.heard(ROUTER.name, 1)
        assert Launch(DECODE, launch + 1) in running.due()
        running.started(DECODE.name, launch + 1, info(DECODE, 10 + launch))
    for _ in range(4):
        clock.advance(RESTART_BACKOFF_RESET_S / 4)
        running.heard(DECODE.name, 4)
        running.heard(PREFILL.name, 1)
        running.heard(ROUTER.name, 1)
    running.ended(DECODE.name, 4, "killed")
    due = running.next_due()
    assert due is not None
    assert due - clock.now() == pytest.approx(BACKOFF_S)


def test_silence_kills_and_restarts(running, clock):
    clock.advance(HEALTH_SILENCE_MAX_S / 2)
    running.heard(ROUTER.name, 1)
    running.heard(PREFILL.name, 1)
    clock.advance(HEALTH_SILENCE_MAX_S / 2)
    (kill,) = running.due()
    assert isinstance(kill, Kill)
    assert (kill.name, kill.launch) == ("decode-0", 1)
    assert [worker.worker_id for worker in running.membership.workers] == ["prefill-0"]
    clock.advance(BACKOFF_S)
    assert running.due() == [Launch(DECODE, 2)]


def unreached_for(running, clock, seconds):
    """decode-0 has no connection for so long, of which is told once a second; others are heard."""
    for _ in range(round(seconds)):
        clock.advance(1.0)
        running.unreached(DECODE.name, 1)
        running.heard(ROUTER.name, 1)
        running.heard(PREFILL.name, 1)


def test_one_that_is_cut_off_and_comes_back_goes_on_as_it_was(running, clock):
    before = running.membership
    unreached_for(running, clock, UNREACHED_MAX_S)
    assert running.due() == []
    running.heard(DECODE.name, 1)
    clock.advance(HEALTH_SILENCE_MAX_S - 1.0)
    assert all(effect.name != DECODE.name for effect in running.due()), "it has all its time again"
    assert before.workers[1] in running.membership.workers


def test_one_that_is_cut_off_for_too_long_is_replaced_and_its_return_comes_too_late(running, clock):
    unreached_for(running, clock, UNREACHED_MAX_S + 1.0)
    (kill,) = running.due()
    assert kill == Kill("decode-0", 1, "running and unreached for too long")
    assert [worker.worker_id for worker in running.membership.workers] == ["prefill-0"]
    clock.advance(BACKOFF_S)
    assert running.due() == [Launch(DECODE, 2)]
    running.started(DECODE.name, 2, info(DECODE, 3))
    told = running.membership
    for report in (running.heard, running.unreached):
        report(DECODE.name, 1)
    running.started(DECODE.name, 1, info(DECODE, 2))
    running.ended(DECODE.name, 1, "its network is back")
    assert running.membership == told
    assert running.late_reports == 4


def test_death_needs_no_patience_with_one_that_is_cut_off(running, clock):
    unreached_for(running, clock, 1.0)
    running.ended(DECODE.name, 1, "its node is dead")
    clock.advance(BACKOFF_S)
    assert running.due() == [Launch(DECODE, 2)]
    running.started(DECODE.name, 2, info(DECODE, 3))
    unreached_for(running, clock, UNREACHED_MAX_S)
    assert running.due() == [], "the new one was heard of"


def test_a_supervisor_that_heard_nobody_gives_one_that_is_cut_off_its_time_again(running, clock):
    unreached_for(running, clock, UNREACHED_MAX_S)
    running.grant_time()
    unreached_for(running, clock, UNREACHED_MAX_S - 1.0)
    assert running.due() == []
    unreached_for(running, clock, 2.0)
    assert [effect.name for effect in running.due()] == [DECODE.name]


def test_a_start_that_nobody_reaches_has_the_time_of_a_start(state, clock):
    state.due()
    state.unreached(DECODE.name, 1)
    clock.advance(WORKER_START_TIMEOUT_S - 1.0)
    assert state.due() == []


def test_a_start_that_takes_too_long_is_killed(state, clock):
    state.due()
    clock.advance(WORKER_START_TIMEOUT_S)
    assert {effect.name for effect in state.due() if isinstance(effect, Kill)} == {
        "router-0",
        "prefill-0",
        "decode-0",
    }


def test_late_reports_of_an_old_launch_change_nothing(running, clock):
    running.ended(PREFILL.name, 1, "killed")
    clock.advance(BACKOFF_S)
    running.due()
    running.started(PREFILL.name, 2, info(PREFILL, 3))
    before = running.membership
    running.ended(PREFILL.name, 1, "killed, told twice")
    running.heard(PREFILL.name, 1)
    running.started(PREFILL.name, 1, info(PREFILL, 1))
    assert running.membership == before
    assert running.late_reports == 3


def test_a_doubled_end_counts_once(running):
    running.ended(PREFILL.name, 1, "killed")
    version, due = running.membership.version, running.next_due()
    running.ended(PREFILL.name, 1, "killed")
    assert (running.membership.version, running.next_due()) == (version, due)


def test_what_cannot_start_is_not_tried_again(state, clock):
    state.due()
    state.ended(PREFILL.name, 1, "cache.memory_bytes: too small", for_good=True)
    clock.advance(RESTART_BACKOFF_MAX_S)
    assert state.due() == []
    report = state.reports()[1]
    assert report.failed_for_good
    assert report.last_end == "cache.memory_bytes: too small"


def test_what_has_run_is_tried_again_whatever_it_says(running, clock):
    running.ended(ROUTER.name, 1, "killed")
    clock.advance(BACKOFF_S)
    running.due()
    running.ended(ROUTER.name, 2, "router.port: in use", for_good=True)
    clock.advance(2 * BACKOFF_S)
    assert [type(effect) for effect in running.due()] == [Launch]


def test_a_restarted_router_keeps_its_port(running, clock):
    running.ended(ROUTER.name, 1, "killed")
    assert running.routers() == ()
    clock.advance(BACKOFF_S)
    assert running.due() == [Launch(RouterSpec("router-0", "127.0.0.1", 7000, 7001), 2)]


def test_shut_down_stops_what_lives_and_nothing_starts_again(running, clock):
    running.ended(DECODE.name, 1, "killed")
    assert running.shut_down() == ((Stop("router-0", 1),), (Stop("prefill-0", 1),))
    assert running.membership.workers == ()
    running.ended(PREFILL.name, 1, "stopped")
    clock.advance(1000.0)
    assert running.due() == []
    assert running.next_due() is None
    assert {report.phase for report in running.reports()} == {Phase.STOPPED}


def test_a_report_about_a_launch_that_never_was_is_our_bug(state):
    with pytest.raises(AssertionError, match="never asked for"):
        state.ended(PREFILL.name, 1, "killed")


def test_two_members_of_one_name_are_refused(clock):
    with pytest.raises(AssertionError, match="share a name"):
        ClusterState((PREFILL, PREFILL), BACKOFF_S, clock)


def decoders(state):
    return {w.worker_id: w.is_draining for w in state.membership.workers if w.role is Role.DECODE}


def add_decoder(state, incarnation):
    name = state.add_worker(Role.DECODE)
    (launch,) = state.due()
    assert (launch.spec.name, launch.launch, launch.spec.role) == (name, 1, Role.DECODE)
    state.started(name, 1, info(launch.spec, incarnation))
    return name


def test_a_worker_is_added_and_taken_out(running):
    assert add_decoder(running, 3) == "decode-1"
    assert decoders(running) == {"decode-0": False, "decode-1": False}
    version = running.drain("decode-0")
    assert version == running.membership.version
    assert decoders(running) == {"decode-0": True, "decode-1": False}
    assert running.is_running("decode-0")
    assert running.remove("decode-0") == Stop("decode-0", 1)
    assert decoders(running) == {"decode-1": False}
    assert running.is_complete
    running.ended("decode-0", 1, "stopped")
    running.heard("decode-0", 1)
    assert running.late_reports == 2
    # Not the name of the one that left: its late reports would be about another.
    assert add_decoder(running, 4) == "decode-2"


def test_one_that_ends_while_it_drains_is_gone(running, clock):
    add_decoder(running, 3)
    running.drain("decode-0")
    running.ended("decode-0", 1, "killed")
    assert not running.is_running("decode-0")
    assert running.remove("decode-0") is None
    clock.advance(BACKOFF_S)
    assert running.due() == []
    assert [report.name for report in running.reports()] == ["router-0", "prefill-0", "decode-1"]


def test_one_that_is_silent_while_it_drains_is_killed_and_gone(running, clock):
    add_decoder(running, 3)
    running.drain("decode-0")
    clock.advance(HEALTH_SILENCE_MAX_S)
    killed = {effect.name for effect in running.due() if isinstance(effect, Kill)}
    assert "decode-0" in killed
    assert "decode-0" not in {report.name for report in running.reports()}


def test_what_does_not_run_has_nothing_to_end(running):
    name = running.add_worker(Role.PREFILL)
    assert running.drain(name) is None
    assert running.remove(name) is None
    starting = running.add_worker(Role.PREFILL)
    running.due()
    assert running.drain(starting) is None
    assert running.remove(starting) == Stop(starting, 1)


def test_somebody_is_left_who_decodes(running, clock):
    for order in (lambda: running.drain("decode-0"), lambda: change(running, Role.PREFILL)):
        with pytest.raises(InvalidInput, match="decode-0 is the only one running that decodes"):
            order()
    add_decoder(running, 3)
    running.drain("decode-1")
    with pytest.raises(InvalidInput, match="the only one"):
        running.drain("decode-0")
    assert running.drain("prefill-0") is not None


def change(state, role):
    state.set_role("decode-0", role)


def test_a_role_stays_with_the_worker(running, clock):
    add_decoder(running, 3)
    change(running, Role.PREFILL)
    assert decoders(running) == {"decode-1": False}
    running.ended("decode-0", 1, "killed")
    clock.advance(BACKOFF_S)
    assert Launch(DECODE, 2) in running.due()
    running.started("decode-0", 2, info(DECODE, 5))
    assert decoders(running) == {"decode-1": False}
    assert {w.worker_id: w.role for w in running.membership.workers}["decode-0"] is Role.PREFILL
    change(running, Role.DECODE)
    assert decoders(running) == {"decode-0": False, "decode-1": False}


@pytest.mark.parametrize("name", ["decode-9", "router-0", ""])
def test_orders_about_strangers_are_refused(running, name):
    for order in (running.drain, lambda name: running.set_role(name, Role.BOTH)):
        with pytest.raises(UnknownWorker, match="its workers are decode-0, prefill-0"):
            order(name)


def test_what_is_taken_out_is_left_alone(running):
    add_decoder(running, 3)
    running.drain("decode-0")
    for order in (lambda: running.drain("decode-0"), lambda: change(running, Role.BOTH)):
        with pytest.raises(InvalidInput, match="decode-0 is being taken out already"):
            order()


def test_without_handoffs_every_worker_is_both(clock):
    none = WorkerGroupConfig(count=0)
    groups = WorkersConfig(none, none, WorkerGroupConfig(count=1))
    state = ClusterState((ROUTER,), BACKOFF_S, clock, groups)
    with pytest.raises(InvalidInput, match="role: must be both"):
        state.add_worker(Role.DECODE)
    assert state.add_worker(Role.BOTH) == "both-0"
