"""An operator changes a cluster of real processes while clients ask it."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from cluster.client import CallFailed, Client
from cluster.process_census import processes_of
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.local_cluster import local_cluster
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.local_cluster import RunningCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

QUESTIONS = ("Three rivers:", "The capital of France is", "One, two, three,")


def answer_of(address: str, question: str) -> str:
    request = inference.GenerateRequest(
        text=question,
        sampling=inference.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
    )
    with Client(address) as client:
        return "".join(response.text for response in client.generate(request))


def order(cluster: RunningCluster, *words: str) -> str:
    """What the command line says."""
    command = [sys.executable, "-m", "cluster.cli", *words, "--address", cluster.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout


def wait_for(cluster: RunningCluster, **roles: str) -> None:
    wanted = {name.replace("_", "-"): role for name, role in roles.items()}
    cluster.wait_for_status(
        lambda status: (
            {worker.worker_id: worker.role for worker in status.workers} == wanted
            and all(worker.reachable for worker in status.workers)
        ),
        timeout_s=180.0,
    )


def test_workers_come_and_go_and_nobody_notices() -> None:
    with local_cluster() as cluster:
        expected = {question: answer_of(cluster.address, question) for question in QUESTIONS}
        told: list[tuple[str, str]] = []
        is_over = threading.Event()

        def ask(question: str) -> None:
            while not is_over.is_set():
                try:
                    told.append((question, answer_of(cluster.address, question)))
                except CallFailed as failure:
                    told.append((question, f"failed: {failure}"))

        clients = [threading.Thread(target=ask, args=[each]) for each in QUESTIONS]
        for client in clients:
            client.start()
        try:
            assert "decode-1 is being started" in order(cluster, "add-worker", "decode")
            wait_for(cluster, prefill_0="prefill", decode_0="decode", decode_1="decode")
            gone = cluster.worker("decode-0").pid
            assert "nothing left to do" in order(cluster, "remove-worker", "decode-0")
            wait_for(cluster, prefill_0="prefill", decode_1="decode")
            assert gone not in {process.pid for process in processes_of(cluster.directory)}
            order(cluster, "set-role", "prefill-0", "both")
            order(cluster, "remove-worker", "decode-1", "--drain-s", "0")
            wait_for(cluster, prefill_0="both")
            enough = len(told) + len(QUESTIONS)
            wait_until("answers", lambda: len(told) >= enough, 120, state=lambda: told)
        finally:
            is_over.set()
            for client in clients:
                client.join(120)
        assert {pair for pair in told if pair[1] != expected[pair[0]]} == set()
