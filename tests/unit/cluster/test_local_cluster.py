"""How a cluster ends when ending it fails, without Ray's processes."""

from __future__ import annotations

import dataclasses

import pytest

from cluster import local_cluster, ray_runtime
from cluster.local_cluster import LocalCluster, StopReport
from kvferry.clock import MonotonicClock
from kvferry.config import ClusterConfig
from kvferry.errors import WorkerUnavailable
from kvferry.router_config import RouterConfig


class FakeSupervisor:
    def __init__(self, error):
        self.error = error

    def stop(self):
        raise self.error


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(ray_runtime, "stop_ray", lambda: None)
    made = LocalCluster(ClusterConfig(), MonotonicClock())
    yield made
    if made._reaper.returncode is None:
        made.stop()


def assert_nothing_left(cluster):
    assert not cluster.directory.exists()
    assert cluster._reaper.returncode == 0


def test_a_supervisor_that_is_gone_is_no_error(cluster):
    cluster._supervisor = FakeSupervisor(WorkerUnavailable("gone"))
    assert cluster.stop() == StopReport((), ())
    assert_nothing_left(cluster)


@pytest.mark.parametrize("failing", ["supervisor", "stop_ray", "processes_of"])
def test_a_step_that_fails_is_reported_and_keeps_no_other_from_running(
    cluster, failing, monkeypatch
):
    def fail(*_arguments):
        raise RuntimeError(failing)

    match failing:
        case "supervisor":
            cluster._supervisor = FakeSupervisor(RuntimeError(failing))
        case "stop_ray":
            monkeypatch.setattr(ray_runtime, "stop_ray", fail)
        case _:
            monkeypatch.setattr(local_cluster, "processes_of", fail)
    with pytest.raises(RuntimeError, match=failing):
        cluster.stop()
    assert_nothing_left(cluster)


def test_what_is_left_to_the_node_listens_on_loopback_and_nothing_else_does(cluster):
    config = cluster.config
    assert (config.router.host, config.worker_host) == ("127.0.0.1", "127.0.0.1")
    told = dataclasses.replace(
        ClusterConfig(), router=RouterConfig(host="10.0.0.7"), worker_host="10.0.0.8"
    )
    other = LocalCluster(told, MonotonicClock())
    try:
        assert other.config == told
    finally:
        other.stop()
