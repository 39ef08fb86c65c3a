"""What a running cluster listens at: the table of docs/security.md, read off its processes."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import psutil
import pytest

from cluster.client import Client
from cluster.process_census import processes_of
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.local_cluster import local_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.local_cluster import RunningCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(scope="module")
def running() -> Iterator[RunningCluster]:
    # Over the network, so that links listen, too.
    with local_cluster(**{"handoff.transport": "gloo"}) as running:
        sampling = inference.SamplingParams(max_tokens=4, temperature=0.0)
        with Client(running.address) as client:
            list(client.generate(inference.GenerateRequest(text="A river", sampling=sampling)))
        yield running


def _listening(running: RunningCluster) -> list[tuple[int, str, int]]:
    """(process, address, port) of every listening socket of the cluster."""
    return [
        (entry.pid, each.laddr.ip.removeprefix("::ffff:"), each.laddr.port)
        for entry in processes_of(running.directory)
        for each in psutil.Process(entry.pid).net_connections(kind="tcp")
        if each.status == psutil.CONN_LISTEN
    ]


def test_front_doors_and_workers_listen_where_they_are_told_and_nowhere_else(
    running: RunningCluster,
) -> None:
    workers = {worker.pid: worker.address for worker in running.status().workers}
    routers = {running.address, running.openai_url.split("//")[1].removesuffix("/v1")}
    told = {int(address.rpartition(":")[2]) for address in [*workers.values(), *routers]}
    listening = _listening(running)
    assert told <= {port for _, _, port in listening}
    for pid, host, port in listening:
        if port in told:
            assert ipaddress.ip_address(host).is_loopback, (pid, host, port)
    # Beside Ray's own port of each process, on all interfaces, workers have nothing but loopback.
    for pid in workers:
        open_ports = [
            port
            for process, host, port in listening
            if process == pid and not ipaddress.ip_address(host).is_loopback
        ]
        assert len(open_ports) <= 1, (pid, open_ports)


def test_no_dashboard_and_no_client_server_listens(running: RunningCluster) -> None:
    ports = {port for _, _, port in _listening(running)}
    assert ports
    assert not ports & {8265, 10001}
