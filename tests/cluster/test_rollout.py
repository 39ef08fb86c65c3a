"""A cluster of real processes gets other configurations while clients ask it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.asking_clients import asking_clients
from tests.support.local_cluster import SMALL, local_cluster

if TYPE_CHECKING:
    from tests.support.local_cluster import RunningCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def order(cluster: RunningCluster, *words: str) -> str:
    """What the command line says."""
    command = [sys.executable, "-m", "cluster.cli", *words, "--address", cluster.address]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    ).stdout


def apply(cluster: RunningCluster, **changes: object) -> str:
    given = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return order(cluster, "apply", *flags)


def names(cluster: RunningCluster) -> dict[str, str]:
    return {worker.worker_id: worker.role for worker in cluster.status().workers}


def test_configurations_change_and_nobody_notices() -> None:
    with local_cluster() as cluster, asking_clients(cluster.address) as clients:
        told = apply(cluster, scheduler__queue_max=100)
        assert "changes: scheduler.queue_max" in told
        assert "2 of 2 replaced" in told
        assert "decode-0" not in names(cluster)
        clients.wait_for_answers(2)
        assert "done, 1 of 1 replaced" in apply(
            cluster, scheduler__queue_max=100, router__requests_max=100
        )
        clients.wait_for_answers(2)
        # Another context length is another model to routers: nothing of the old one is mixed in.
        before = names(cluster)
        told = apply(
            cluster,
            scheduler__queue_max=100,
            router__requests_max=100,
            model__context_length=2048,
        )
        assert "3 of 3 replaced" in told
        assert len(names(cluster)) == len(before)
        clients.wait_for_answers(2)


def test_all_workers_are_restarted_one_after_the_other() -> None:
    with local_cluster() as cluster, asking_clients(cluster.address) as clients:
        before = {worker.pid for worker in cluster.status().workers}
        told = order(cluster, "restart", "all")
        assert "done, 2 of 2 replaced" in told
        clients.wait_for_answers(3)
        after = cluster.status().workers
        assert not before & {worker.pid for worker in after}
        assert sorted(worker.role for worker in after) == ["decode", "prefill"]
        # By name, and twice: what was new a moment ago is replaced like any other.
        decode = next(worker.worker_id for worker in after if worker.role == "decode")
        assert "done, 1 of 1 replaced" in order(cluster, "restart", decode)
        clients.wait_for_answers(3)


def test_another_model_takes_over_and_no_request_meets_both() -> None:
    with local_cluster() as cluster, asking_clients(cluster.address) as clients:
        clients.wait_for_answers(3)
        assert "done, 3 of 3 replaced" in apply(cluster, model__quantization="int8")
        clients.learn_new_model()
        clients.wait_for_answers(6)
        assert "nothing differs" in apply(cluster, model__quantization="int8")
