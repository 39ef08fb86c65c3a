"""Faults of a cluster as users run it: Ray, the supervisor and the real model.

Few and slow: what they add to the faults of plain processes is the rest of the product.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from cluster.client import Client
from kvferry.convert import accounts_from_wire
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.fault_load import Load, Question, ask
from tests.support.fault_plan import Blow, Fault, ray_faults
from tests.support.fault_trace import TraceTail
from tests.support.local_cluster import RunningCluster, local_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

END_WITHIN_S = 120.0
"""Three attempts at 400 tokens, computed on half a core, and the silences in between."""
WHOLE_WITHIN_S = 120.0
"""A worker loads torch and the model anew."""
_MOMENT_S = 60.0
_PEER_S = 5.0
_DECODING_S = 0.2
CLIENTS = 4

FAULTS = {str(fault): fault for fault in ray_faults()}


class Arena:
    """A running cluster and questions whose answers it gave undisturbed."""

    def __init__(self, cluster: RunningCluster, trace_file: Path) -> None:
        self.cluster = cluster
        self.trace_file = trace_file
        rng = random.Random(3)
        self.questions = [self._asked(rng, length) for length in (20, 100, 250, 400)]

    def _asked(self, rng: random.Random, length: int) -> Question:
        """Private, so that its KV moves each time it is asked."""
        prompt = tuple(rng.randrange(1000, 40_000) for _ in range(length))
        asked = Question(prompt, (0,) * 12, inference.SHARING_PRIVATE)
        outcome = ask(self.cluster.address, asked, END_WITHIN_S)
        assert outcome.code == "OK", outcome
        return dataclasses.replace(asked, expected=outcome.tokens)

    def suffer(self, fault: Fault) -> None:
        """One episode: load, the blow, everybody whole, idle and in order."""
        question = functools.partial(random.Random(0).choice, self.questions)
        load = Load(self.cluster.address, [question] * CLIENTS, END_WITHIN_S)
        tail = TraceTail(self.trace_file)
        load.start()
        try:
            self._strike(fault, self._victim(fault, tail))
        finally:
            outcomes = load.stop()
        assert not load.problems(), "\n".join(load.problems())
        assert any(outcome.code == "OK" for outcome in outcomes)
        self._wait_idle()

    def _victim(self, fault: Fault, tail: TraceTail) -> inference.WorkerSummary:
        decoding = fault.state == "decoding"
        line = tail.wait_for(fault.side, "adopted" if decoding else fault.state, _MOMENT_S)
        if decoding:
            time.sleep(_DECODING_S)
        if fault.victim == fault.side:
            return self.cluster.worker(line.worker_id)
        return self.cluster.worker(tail.worker_of(line.handoff, fault.victim, _PEER_S))

    def _strike(self, fault: Fault, victim: inference.WorkerSummary) -> None:
        if fault.blow is Blow.KILL:
            self.cluster.kill(victim.pid)
            self.cluster.wait_for_status(
                lambda status: all(
                    entry.incarnation != victim.incarnation for entry in status.workers
                )
            )
            return
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(fault.for_s or 0.0)
        os.kill(victim.pid, signal.SIGCONT)

    def _wait_idle(self) -> None:
        self.cluster.wait_for_status(
            lambda status: (
                len(status.workers) == 4
                and all(
                    entry.reachable
                    and accounts_from_wire(entry.accounts).is_idle
                    and entry.load.handoffs == 0
                    for entry in status.workers
                )
            ),
            timeout_s=WHOLE_WITHIN_S,
        )
        with Client(self.cluster.address) as client:
            audits = client.audit("").audits
        assert len(audits) == 4
        assert all(entry.HasField("report") and not entry.report.violations for entry in audits)


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    trace_file = tmp_path_factory.mktemp("ray-faults") / "trace"
    shape = {"workers__prefill__count": 2, "workers__decode__count": 2}
    with local_cluster(
        **shape, handoff__trace_file=trace_file, scheduler__chunk_tokens=64
    ) as cluster:
        yield Arena(cluster, trace_file)


@pytest.mark.parametrize("name", FAULTS)
def test_ray_fault(arena, name):
    arena.suffer(FAULTS[name])
