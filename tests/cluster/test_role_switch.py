"""A worker of real processes changes its role while clients ask."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cluster.client import Client
from tests.support.asking_clients import asking_clients
from tests.support.local_cluster import local_cluster

if TYPE_CHECKING:
    from tests.support.local_cluster import RunningCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def order(cluster: RunningCluster, *words: str) -> str:
    """What the command line says."""
    command = [sys.executable, "-m", "cluster.cli", *words, "--address", cluster.address]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    ).stdout


def test_a_worker_changes_its_role_and_back_and_keeps_its_cache() -> None:
    with local_cluster() as cluster, asking_clients(cluster.address) as clients:
        order(cluster, "scale", "decode", "2")
        cluster.wait_for_status(
            lambda status: (
                len(status.workers) == 3 and all(each.reachable for each in status.workers)
            ),
            180.0,
        )
        clients.wait_for_answers(6)
        pid = cluster.worker("prefill-0").pid
        hits = cluster.worker("prefill-0").indexed_blocks
        order(cluster, "switch-role", "prefill-0", "decode")
        clients.wait_for_answers(6)
        order(cluster, "switch-role", "prefill-0", "prefill")
        clients.wait_for_answers(6)
        after = cluster.worker("prefill-0")
        assert (after.pid, after.role) == (pid, "prefill")
        assert after.indexed_blocks >= hits
        with Client(cluster.address) as client:
            audits = client.audit("").audits
        assert all(entry.HasField("report") and not entry.report.violations for entry in audits)
