"""A cluster on three Ray nodes, each in a network namespace, whose nodes die and lose the network.

`--scenario-minutes` is for the length of the load; without it, as short as the troubles let it be.
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
    from collections.abc import Iterator
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


def test_a_second_start_changes_nothing(cluster):
    before = {worker.worker_id: worker.incarnation for worker in cluster.status().workers}
    again = cluster.up()
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines() == [
        "kvferry cluster 'kvferry' runs already",
        "nothing differs from what the cluster runs under",
    ]
    after = {worker.worker_id: worker.incarnation for worker in cluster.status().workers}
    assert after == before


@pytest.mark.slow
def test_no_answer_is_lost_or_wrong_while_every_node_dies_once(cluster, pytestconfig):
    minutes = float(pytestconfig.getoption("--scenario-minutes"))
    scenario = Scenario(cluster, minutes, clients=8 if minutes else 4)
    try:
        scenario.run()
    finally:
        scenario.load.stop()
    scenario.check()


class Scenario:
    """Load, while every node is killed once with all its processes, the head among them, one loses
    the network, a role is switched twice, and one worker joins and one leaves."""

    def __init__(self, cluster: Cluster, minutes: float, clients: int) -> None:
        self.load = MixedLoad(cluster.addresses, mixed_questions(1, 12, 60), clients)
        self._cluster = cluster
        self._clock = MonotonicClock()
        self._length_s = 60.0 * minutes
        self._began = 0.0
        self._joined: list[str] = []

    def run(self) -> None:
        """Without minutes one trouble follows the other; else they are spread over that time."""
        self.load.learn()
        self.load.start()
        self._began = self._clock.now()
        head, b, c = self._cluster.nodes.nodes
        troubles = (
            lambda: self._switch("decode"),
            lambda: self._kill_and_restart(c),
            lambda: self._switch("prefill"),
            lambda: self._kill_and_restart(head),
            self._join,
            lambda: self._cut(max(b, c, key=lambda node: len(self._cluster.on(node)))),
            self._leave,
            lambda: self._kill_and_restart(b),
        )
        for number, trouble in enumerate(troubles, 1):
            trouble()
            rest_s = self._began + self._length_s * number / len(troubles) - self._clock.now()
            time.sleep(max(0.0, rest_s))

    def check(self) -> None:
        """After the load."""
        self._say(f"{self.load.right} right, {self.load.refused} refused")
        assert not self.load.problems, "\n".join(self.load.problems)
        self._cluster.wait_for_workers(WORKERS, idle=True)
        with Client(*self._cluster.addresses) as operator:
            audits = operator.audit("").audits
        assert {entry.worker_id for entry in audits} == WORKERS
        assert all(entry.HasField("report") and not entry.report.violations for entry in audits)
        self._say("idle, and every ledger right")

    def _switch(self, role: str) -> None:
        with Client(*self._cluster.addresses) as operator:
            operator.set_role("prefill-1", role)

    def _join(self) -> None:
        with Client(*self._cluster.addresses) as operator:
            self._joined.append(operator.add_worker("decode"))
        self._wait_for_workers()
        self._say(f"{self._joined[-1]} serves")

    def _leave(self) -> None:
        with Client(*self._cluster.addresses) as operator:
            operator.remove_worker(self._joined.pop(), 60.0)

    def _kill_and_restart(self, node: RayNode) -> None:
        gone = self._cluster.on(node)
        assert gone, f"nobody dies with {node.host.name}"
        also = " and the supervisor" * node.supervises() + " and Ray's head" * node.is_head
        node.kill()
        killed_at = self._clock.now()
        self._say(f"killed {node.host.name}, with it {', '.join(gone)}{also}")
        # Those who ask are served meanwhile, by what is left.
        self.load.wait_for_answers(2 * self.load.clients)
        answered_at = self._clock.now()
        node.start()
        started_at = self._clock.now()
        self._wait_for_workers(frozenset(gone.values()))
        self._say(
            f"{node.host.name}: asked again after {answered_at - killed_at:.1f} s, "
            f"a node after {started_at - killed_at:.1f} s, "
            f"all of the cluster serves after {self._clock.now() - killed_at:.1f} s"
        )

    def _cut(self, node: RayNode) -> None:
        """Whoever is cut off for a while is not taken for dead."""
        before = self._cluster.on(node)
        assert before, f"nobody is cut off with {node.host.name}"
        self._say(f"{node.host.name} loses the network, and with it {', '.join(before)}")
        self._cluster.nodes.network.cut(node.host)
        time.sleep(CUT_S)
        self._cluster.nodes.network.mend(node.host)
        mended_at = self._clock.now()
        self._wait_for_workers()
        assert self._cluster.on(node) == before
        self._say(f"all of the cluster serves {self._clock.now() - mended_at:.1f} s later")

    def _wait_for_workers(self, gone: frozenset[int] = frozenset()) -> None:
        self._cluster.wait_for_workers(WORKERS | {*self._joined}, gone)

    def _say(self, text: str) -> None:
        print(f"{self._clock.now() - self._began:6.1f} s: {text}")  # noqa: T201
