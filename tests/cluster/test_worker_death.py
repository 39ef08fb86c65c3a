"""SIGKILL of a worker under load: nothing hangs, nothing leaks, the next request works."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from cluster.client import CallFailed, Client
from kvferry.convert import accounts_from_wire
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.local_cluster import RunningCluster, local_cluster
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

END_WITHIN_S = 60.0
"""A retry computes 2000 tokens anew: 7 s of a free core, several times that of a busy one."""


class Stream(threading.Thread):
    """Reads one greedy answer in the background."""

    def __init__(self, address: str, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self.finish: inference.Finish | None = None
        self.error: CallFailed | None = None
        self._address = address
        self._request = inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=prompt),
            sampling=inference.SamplingParams(
                max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            ),
        )
        self.start()

    def run(self) -> None:
        try:
            with Client(self._address) as client:
                for response in client.generate(self._request):
                    self.tokens += response.token_ids
                    if response.HasField("finish"):
                        self.finish = response.finish
        except CallFailed as error:
            self.error = error

    def wait_ended(self) -> None:
        self.join(END_WITHIN_S)
        assert not self.is_alive(), f"still streaming after {END_WITHIN_S} s"
        assert (self.finish is None) != (self.error is None), "not exactly one end"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with local_cluster(scheduler__chunk_tokens=128) as running:
        yield running


def _prompt(seed: int, length: int) -> list[int]:
    return [1000 + (seed * 7919 + position * position * 31) % 40_000 for position in range(length)]


def _wait_restarted(cluster: RunningCluster, name: str, old: int) -> None:
    def restarted(status: inference.ClusterStatusResponse) -> bool:
        return any(
            entry.worker_id == name and entry.incarnation != old and entry.reachable
            for entry in status.workers
        )

    cluster.wait_for_status(restarted)


def _wait_idle(cluster: RunningCluster) -> None:
    def idle(status: inference.ClusterStatusResponse) -> bool:
        return len(status.workers) == 2 and all(
            entry.reachable and accounts_from_wire(entry.accounts).is_idle
            for entry in status.workers
        )

    cluster.wait_for_status(idle)


def _assert_serves(cluster: RunningCluster, expected: list[int], prompt: list[int]) -> None:
    stream = Stream(cluster.address, prompt, len(expected))
    stream.wait_ended()
    assert stream.error is None
    assert stream.tokens == expected
    _wait_idle(cluster)
    with Client(cluster.address) as client:
        audits = client.audit("").audits
    assert [entry.worker_id for entry in audits] == ["decode-0", "prefill-0"]
    assert all(entry.HasField("report") and not entry.report.violations for entry in audits), audits


def test_prefill_worker_killed_while_it_computes(cluster: RunningCluster) -> None:
    short = _prompt(1, 40)
    undisturbed = Stream(cluster.address, short, 60)
    undisturbed.wait_ended()
    assert undisturbed.error is None

    decoding = Stream(cluster.address, short, 60)
    wait_until("decoding", lambda: len(decoding.tokens) >= 3, END_WITHIN_S)
    computing = Stream(cluster.address, _prompt(2, 2000), 4)
    before = cluster.worker("prefill-0")
    cluster.wait_for_status(
        lambda status: any(
            entry.worker_id == "prefill-0" and entry.load.running > 0 for entry in status.workers
        )
    )
    cluster.kill(before.pid)

    computing.wait_ended()
    assert computing.error is None or "UNAVAILABLE" in str(computing.error)
    decoding.wait_ended()
    assert decoding.tokens == undisturbed.tokens
    _wait_restarted(cluster, "prefill-0", before.incarnation)
    _assert_serves(cluster, undisturbed.tokens[:8], short)


def test_decode_worker_killed_while_it_streams(cluster: RunningCluster) -> None:
    short = _prompt(3, 40)
    undisturbed = Stream(cluster.address, short, 60)
    undisturbed.wait_ended()
    assert undisturbed.error is None

    decoding = Stream(cluster.address, short, 60)
    wait_until("decoding", lambda: len(decoding.tokens) >= 3, END_WITHIN_S)
    before = cluster.worker("decode-0")
    cluster.kill(before.pid)

    decoding.wait_ended()
    # The process that takes its place goes on with the answer.
    assert decoding.finish is not None, decoding.error
    assert decoding.tokens == undisturbed.tokens
    assert decoding.finish.usage.attempt > 1
    assert decoding.finish.usage.completion_tokens == 60
    _wait_restarted(cluster, "decode-0", before.incarnation)
    _assert_serves(cluster, undisturbed.tokens, short)


def test_decode_worker_killed_during_a_handoff(cluster: RunningCluster) -> None:
    short = _prompt(4, 40)
    undisturbed = Stream(cluster.address, short, 8)
    undisturbed.wait_ended()

    moving = Stream(cluster.address, _prompt(5, 2000), 4)
    before = cluster.worker("decode-0")
    cluster.wait_for_status(
        lambda status: any(
            entry.worker_id == "decode-0" and entry.accounts.inbound > 0 for entry in status.workers
        )
    )
    cluster.kill(before.pid)

    moving.wait_ended()
    _wait_restarted(cluster, "decode-0", before.incarnation)
    _assert_serves(cluster, undisturbed.tokens, short)
