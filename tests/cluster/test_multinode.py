"""A cluster on three Ray nodes, each in a network namespace, whose nodes die and lose the network.

The head is cut off from nobody and lives throughout: its end is a matter of Ray's own.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from cluster.client import CallFailed, Client
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import BUNDLED_MODEL
from kvferry.convert import accounts_from_wire
from tests.support import namespaces
from tests.support.multinode_load import MixedLoad, mixed_questions
from tests.support.ray_nodes import RayNodes
from tests.support.tiny_llama import make_tiny_llama
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvferry.rpc.v1 import inference_pb2 as inference
    from tests.support.ray_nodes import RayNode

WORKERS = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
WHOLE_WITHIN_S = 120.0
IDLE_WITHIN_S = 60.0
CUT_S = 20.0
_READY = re.compile(r" at (\S+), the OpenAI API at (.+); ")

SETTINGS = """
model: {{path: {model}, served_name: tiny, context_length: 2048}}
workers: {{prefill: {{count: 2}}, decode: {{count: 2}}}}
cache: {{memory_bytes: 67108864}}
router: {{replicas: 2, status_interval_s: 0.2}}
restart_backoff_s: 0.2
"""


class Cluster:
    """What `kvferry up` has started on the nodes."""

    def __init__(self, nodes: RayNodes, settings: Path) -> None:
        self.nodes = nodes
        self._settings = settings
        up = self.up()
        assert up.returncode == 0, up.stdout + up.stderr
        found = _READY.search(up.stdout)
        assert found is not None, up.stdout
        self.addresses = found[1].split(",")

    def up(self):
        return self.nodes.head.run("up", "--config", self._settings)

    def down(self):
        return self.nodes.nodes[-1].run("down")

    def status(self, *addresses: str) -> inference.ClusterStatusResponse:
        with Client(*(addresses or self.addresses)) as client:
            return client.cluster_status()

    def wait_for_workers(
        self, names: set[str], gone: frozenset[int] = frozenset(), *, idle: bool = False
    ) -> None:
        """Every router reaches exactly these, none of them an incarnation that is gone; `idle`: and
        none of them has anything."""
        for address in self.addresses:
            self._wait_at(address, names, gone, idle=idle)

    def _wait_at(self, address: str, names: set[str], gone: frozenset[int], *, idle: bool) -> None:
        seen: list[inference.WorkerSummary] = []

        def is_there() -> bool:
            try:
                seen[:] = self.status(address).workers
            except CallFailed:
                return False  # The router itself comes back.
            reached = {worker.worker_id for worker in seen if worker.reachable}
            fresh = not any(worker.incarnation in gone for worker in seen)
            return reached == names and fresh and (not idle or all(map(_is_idle, seen)))

        wait_until(f"{names} at {address}", is_there, WHOLE_WITHIN_S, state=lambda: seen)

    def on(self, node: RayNode) -> dict[str, int]:
        """Incarnations of the workers that run on a node."""
        return {
            worker.worker_id: worker.incarnation
            for worker in self.status().workers
            if worker.address.startswith(f"{node.address}:")
        }


def _is_idle(worker: inference.WorkerSummary) -> bool:
    return accounts_from_wire(worker.accounts).is_idle and worker.load.handoffs == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("multinode")
    model = make_tiny_llama(directory / "model", tokenizer_from=resolve_model(BUNDLED_MODEL))
    settings = directory / "cluster.yaml"
    settings.write_text(SETTINGS.format(model=model))
    with RayNodes(3, cpus=2) as nodes:
        running = Cluster(nodes, settings)
        try:
            yield running
        finally:
            down = running.down()
        assert down.returncode == 0, down.stdout + down.stderr
        # Before that Ray may tell of a node that is gone.
        assert down.stdout.endswith("stopped\n"), down.stdout
        for node in nodes.nodes:
            assert node.host.pids(), f"Ray has ended on {node.host.name}"
        assert running.down().stdout.endswith("no kvferry cluster 'kvferry' was there\n")


def test_members_are_spread_and_found_under_the_addresses_of_their_nodes(cluster):
    a, b, c = cluster.nodes.nodes
    assert [address.split(":")[0] for address in cluster.addresses] == [a.address, b.address]
    assert {*cluster.on(a), *cluster.on(b), *cluster.on(c)} == WORKERS
    assert all(cluster.on(node) for node in (a, b, c))


def test_a_second_cluster_of_the_same_name_is_refused(cluster):
    again = cluster.up()
    assert again.returncode == 1
    assert "ray.namespace: a kvferry cluster 'kvferry' runs already" in again.stderr
    assert cluster.status().workers


@pytest.mark.slow
def test_no_answer_is_lost_or_wrong_while_nodes_die(cluster):
    suffer(cluster, clients=4, pause=lambda: None)


@pytest.mark.slow
def test_no_answer_is_lost_or_wrong_in_ten_minutes(cluster):
    suffer(cluster, clients=8, pause=lambda: time.sleep(60.0))


def suffer(cluster: Cluster, clients: int, pause: Callable[[], None]) -> None:
    """Load, while a role is switched twice, one worker joins and leaves, nodes are killed and one
    loses the network."""
    began = MonotonicClock().now()
    _, b, c = cluster.nodes.nodes
    load = MixedLoad(cluster.addresses, mixed_questions(1, 12, 60), clients)
    load.learn()
    load.start()
    try:
        with Client(*cluster.addresses) as operator:
            operator.set_role("prefill-1", "decode")
            pause()
            _kill_and_restart(cluster, c)
            pause()
            operator.set_role("prefill-1", "prefill")
            _kill_and_restart(cluster, b)
            pause()
            added = operator.add_worker("decode")
            cluster.wait_for_workers(WORKERS | {added})
            pause()
            _cut(cluster, max(b, c, key=lambda node: len(cluster.on(node))))
            # Ray takes a connection that broke for the end of an actor, which is started anew.
            cluster.wait_for_workers(WORKERS | {added})
            pause()
            operator.remove_worker(added, 60.0)
            pause()
    finally:
        load.stop()
    print(f"{load.right} right, {load.refused} refused")  # noqa: T201
    assert not load.problems, "\n".join(load.problems)
    assert load.right > clients
    cluster.wait_for_workers(WORKERS, idle=True)
    with Client(*cluster.addresses) as operator:
        audits = operator.audit("").audits
    assert {entry.worker_id for entry in audits} == WORKERS
    assert all(entry.HasField("report") and not entry.report.violations for entry in audits)
    print(f"after {MonotonicClock().now() - began:.0f} s")  # noqa: T201


def _kill_and_restart(cluster: Cluster, node: RayNode) -> None:
    gone = frozenset(cluster.on(node).values())
    assert gone, f"nobody dies with {node.host.name}"
    node.kill()
    node.start()
    cluster.wait_for_workers(WORKERS, gone)


def _cut(cluster: Cluster, node: RayNode) -> None:
    assert cluster.on(node), f"nobody is cut off with {node.host.name}"
    cluster.nodes.network.cut(node.host)
    time.sleep(CUT_S)
    cluster.nodes.network.mend(node.host)
