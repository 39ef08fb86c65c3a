"""The supervisor's process is killed while clients ask, and another one takes over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.client import Client
from cluster.process_census import processes_of
from tests.support.asking_clients import asking_clients
from tests.support.local_cluster import local_cluster
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.local_cluster import RunningCluster


def supervisor_of(cluster: RunningCluster) -> int:
    """Its process, once there is one."""

    def found() -> list[int]:
        return [
            entry.pid
            for entry in processes_of(cluster.directory)
            if entry.name.startswith("ray::Superv")
        ]

    wait_until("a supervisor", lambda: len(found()) == 1, 60.0, state=found)
    return found()[0]


def test_a_killed_supervisor_comes_back_and_finds_everybody() -> None:
    with local_cluster() as cluster, asking_clients(cluster.address) as clients:
        before = cluster.status()
        first = supervisor_of(cluster)
        cluster.kill(first)
        clients.wait_for_answers(3)
        # An order reaches the new one by its name; it knows the names that were given.
        cluster.wait_for_status(
            lambda status: status.membership_version > before.membership_version, 60.0
        )
        after = cluster.status()
        assert supervisor_of(cluster) != first
        kept = {(each.worker_id, each.incarnation, each.pid) for each in before.workers}
        assert {(each.worker_id, each.incarnation, each.pid) for each in after.workers} == kept
        # It watches them, too: one that dies is replaced, and the others are left alone.
        cluster.kill(cluster.worker("prefill-0").pid)
        cluster.wait_for_status(
            lambda status: (
                len(status.workers) == 2
                and all(each.reachable for each in status.workers)
                and {each.incarnation for each in status.workers}
                != {each.incarnation for each in before.workers}
            ),
            120.0,
        )
        with Client(cluster.address) as client:
            client.set_role("prefill-0", "both")
        clients.wait_for_answers(1)
        clients.assert_all_right()
