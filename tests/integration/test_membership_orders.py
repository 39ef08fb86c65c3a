"""Workers that come, leave and change their role under load: no answer is lost or another one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest

from kvferry.config import SchedulerConfig, WorkerGroupConfig, WorkersConfig
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.digest_cluster import digest_config
from tests.support.failover_load import Streams, ask, questions
from tests.support.supervised_cluster import SupervisedCluster
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = digest_config(8, 768, scheduler=SchedulerConfig(chunk_tokens=64))
CONFIG = replace(
    CONFIG,
    # Audits after every change are most of the work, and have tests of their own.
    cache=replace(CONFIG.cache, audit=False),
    workers=WorkersConfig(decode=WorkerGroupConfig(count=2)),
    router=replace(CONFIG.router, port=0, status_interval_s=0.1),
)
LONG_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[SupervisedCluster]:
    with SupervisedCluster(CONFIG) as running:
        yield running


def remove(cluster: SupervisedCluster, worker_id: str, drain_s: float) -> bool:
    order = inference.RemoveWorkerRequest(worker_id=worker_id, drain_s=drain_s)
    drained: bool = cluster.admin.RemoveWorker(order, timeout=LONG_S).drained
    return drained


def add(cluster: SupervisedCluster, role: str) -> str:
    order = inference.AddWorkerRequest(role=role)
    name: str = cluster.admin.AddWorker(order, timeout=LONG_S).worker_id
    return name


def test_orders_that_cannot_be_carried_out_name_the_field(cluster: SupervisedCluster) -> None:
    Add, Role, Remove = (
        inference.AddWorkerRequest,
        inference.SetRoleRequest,
        inference.RemoveWorkerRequest,
    )
    admin, invalid = cluster.admin, grpc.StatusCode.INVALID_ARGUMENT
    unknown = grpc.StatusCode.NOT_FOUND
    cases = (
        (admin.AddWorker, Add(role="router"), invalid, "role: is 'router'; must be one of"),
        (admin.SetRole, Role(worker_id="decode-0"), invalid, "role: is ''"),
        (admin.SetRole, Role(worker_id="x", role="both"), unknown, "worker_id: 'x' is not in"),
        (admin.RemoveWorker, Remove(), unknown, "its workers are decode-0, decode-1, prefill-0"),
        *(
            (
                admin.RemoveWorker,
                Remove(worker_id="decode-0", drain_s=wrong),
                invalid,
                "drain_s: is",
            )
            for wrong in (-1.0, float("nan"), float("inf"))
        ),
    )
    for call, order, code, text in cases:
        with pytest.raises(grpc.RpcError, match=text) as caught:
            call(order, timeout=LONG_S)
        assert caught.value.code() is code
    cluster.wait_for("prefill-0", "decode-0", "decode-1")


def test_nothing_is_lost_while_workers_come_and_go(cluster: SupervisedCluster) -> None:
    # The digest model's tokens are no text that a grammar knows.
    requests = [each for each in questions(5)[:7] if not each.sampling.json_schema]
    undisturbed = [ask(cluster.address, number, each) for number, each in enumerate(requests)]
    expected = [outcome.reply for outcome in undisturbed if outcome.reply is not None]
    assert len(expected) == len(requests)
    load = Streams(cluster.address, requests, expected, clients=3)
    load.start()

    def goes_on() -> None:
        """Some more answers, so that each change has met some load."""
        enough = len(load.outcomes) + 3
        wait_until("answers", lambda: len(load.outcomes) >= enough, LONG_S, state=load.problems)

    try:
        goes_on()
        assert remove(cluster, "decode-0", LONG_S)
        cluster.wait_for("prefill-0", "decode-1")
        goes_on()
        assert add(cluster, "decode") == "decode-2"
        cluster.wait_for("prefill-0", "decode-1", "decode-2")
        goes_on()
        role = inference.SetRoleRequest(worker_id="decode-1", role="prefill")
        cluster.admin.SetRole(role, timeout=LONG_S)
        goes_on()
        assert remove(cluster, "prefill-0", LONG_S)
        cluster.wait_for("decode-1", "decode-2")
        assert cluster.status()["decode-1"].role == "prefill"
        goes_on()
        assert add(cluster, "decode") == "decode-3"
        cluster.wait_for("decode-1", "decode-2", "decode-3")
        # No time to end what it has, which goes on at the other one.
        remove(cluster, "decode-2", 0.0)
        goes_on()
    finally:
        load.stop()
    assert load.problems() == []
