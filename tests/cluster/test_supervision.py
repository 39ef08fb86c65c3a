"""Real processes that are killed, and what the supervisor makes of it."""

from __future__ import annotations

import signal

import pytest

from cluster.process_census import processes_of
from tests.support.local_cluster import assert_nothing_left, local_cluster
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def cluster():
    with local_cluster() as running:
        yield running


def both_reachable(status):
    return len(status.workers) == 2 and all(worker.reachable for worker in status.workers)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_killed_worker_comes_back_as_another_and_its_peer_does_not_notice(cluster, name):
    before = cluster.wait_for_status(both_reachable)
    old = cluster.worker(name)
    (peer,) = [worker for worker in before.workers if worker.worker_id != name]
    cluster.kill(old.pid)
    after = cluster.wait_for_status(
        lambda status: (
            both_reachable(status)
            and old.incarnation not in {worker.incarnation for worker in status.workers}
        )
    )
    assert after.membership_version == before.membership_version + 2, "gone, and back"
    untouched = cluster.worker(peer.worker_id)
    assert (untouched.pid, untouched.incarnation) == (peer.pid, peer.incarnation)
    assert cluster.worker(name).pid != old.pid


def test_a_killed_router_comes_back_at_its_address_and_knows_the_workers(cluster):
    before = cluster.wait_for_status(both_reachable)
    (router,) = [
        entry for entry in processes_of(cluster.directory) if entry.name.startswith("ray::Router")
    ]
    cluster.kill(router.pid)
    wait_until("router gone", lambda: router not in processes_of(cluster.directory))
    after = cluster.wait_for_status(both_reachable)
    assert {worker.incarnation for worker in after.workers} == {
        worker.incarnation for worker in before.workers
    }


def test_a_killed_owner_leaves_no_process():
    with local_cluster() as running:
        running.expected_exit_code = -signal.SIGKILL
        assert len(processes_of(running.directory)) > 5
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        assert_nothing_left(running.directory, within_s=20.0)


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing():
    with (
        pytest.raises(AssertionError, match="ended with 1"),
        local_cluster(cache__memory_bytes=1000),
    ):
        pytest.fail("a cache of 1000 bytes holds no token")
