"""The planner in the router of a real cluster, while the load swings from prompts to answers."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from cluster.client import Client
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.asking_clients import asking_clients
from tests.support.local_cluster import local_cluster
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.local_cluster import RunningCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

WITHIN_S = 180.0
READERS = 3
PROMPT_TOKENS = 500
QUESTIONS = tuple(f"The number after {number} is" for number in range(8))
PLANNED = {
    "workers__decode__count": 2,
    "scheduler__running_max": 2,
    "planner__ttft_s": 1.0,
    "planner__itl_ms": 1000.0,
    "planner__interval_s": 1.0,
    "planner__hold_s": 3.0,
}
"""One worker computes prompts, two decode two answers each: room for neither end of the load."""


class Readers:
    """Clients with long prompts, all different, and answers of two tokens, until `stop`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.told: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Prompts and their answers."""
        self.failures: list[Exception] = []
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=[random.Random(number)])
            for number in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def answer_to(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """By a client of its own."""
        request = inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=prompt),
            sampling=inference.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            service_class="SERVICE_CLASS_BATCH",
        )
        with Client(self.address) as client:
            responses = list(client.generate(request))
        return tuple(token for response in responses for token in response.token_ids)

    def stop(self) -> None:
        """Wait for the last answers."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(WITHIN_S)

    def _ask_on(self, rng: random.Random) -> None:
        while not self._is_over.is_set():
            prompt = tuple(rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS))
            try:
                self.told.append((prompt, self.answer_to(prompt)))
            except Exception as failure:  # noqa: BLE001 - the test looks at what ended a thread
                self.failures.append(failure)
                return


@contextlib.contextmanager
def reading(cluster: RunningCluster) -> Iterator[Readers]:
    readers = Readers(cluster.address)
    try:
        yield readers
    finally:
        readers.stop()
    assert readers.failures == []


def steps_of(cluster: RunningCluster) -> set[tuple[str, str, str]]:
    """What the planner decided of late: role, worker, and what became of it."""
    with Client(cluster.address) as client:
        plans = client.plans(0).plans
    return {(step.role, step.worker_id, step.outcome) for plan in plans for step in plan.steps}


def wait_for_step(cluster: RunningCluster, role: str, outcome: str) -> None:
    wait_until(
        f"a switch to {role}, {outcome}",
        lambda: any((to, what) == (role, outcome) for to, _, what in steps_of(cluster)),
        WITHIN_S,
        state=lambda: explained(cluster),
    )


def explained(cluster: RunningCluster) -> str:
    """What the command line says."""
    command = [sys.executable, "-m", "cluster.cli", "plan", "--explain", "--last", "200"]
    told = subprocess.run(
        [*command, "--address", cluster.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return told.stdout


def roles_of(cluster: RunningCluster) -> list[str]:
    return sorted(worker.role for worker in cluster.status().workers)


def assert_clean(cluster: RunningCluster) -> None:
    with Client(cluster.address) as client:
        audits = client.audit("").audits
    assert len(audits) == len(cluster.status().workers)
    assert all(entry.HasField("report") and not entry.report.violations for entry in audits)


def test_workers_follow_a_load_that_swings_and_nobody_is_answered_wrongly() -> None:
    with local_cluster(planner__mode="on", **PLANNED) as cluster:
        with reading(cluster) as readers:
            wait_for_step(cluster, "prefill", "done")
            cluster.wait_for_status(
                lambda status: sum(each.role == "prefill" for each in status.workers) == 2
            )
        with asking_clients(cluster.address, QUESTIONS) as writers:
            wait_for_step(cluster, "decode", "done")
            cluster.wait_for_status(
                lambda status: sum(each.role == "decode" for each in status.workers) == 2
            )
            writers.wait_for_answers(len(QUESTIONS))
        for prompt, answer in readers.told[-3:]:
            assert readers.answer_to(prompt) == answer
        told = explained(cluster)
        assert "planner: on" in told
        assert "-> prefill: done" in told
        assert "-> decode: done" in told
        assert "tokens/s asked" in told
        assert_clean(cluster)


def test_a_dry_run_tells_what_it_would_do_and_does_nothing() -> None:
    with local_cluster(planner__mode="dry_run", **PLANNED) as cluster:
        before = roles_of(cluster)
        with reading(cluster):
            wait_for_step(cluster, "prefill", "not carried out")
        told = explained(cluster)
        assert "planner: dry_run" in told
        assert "-> prefill: not carried out" in told
        assert "TTFT p90" in told
        assert {outcome for _, _, outcome in steps_of(cluster)} == {"not carried out"}
        assert roles_of(cluster) == before
        assert_clean(cluster)
