"""Clusters for fault tests: one for many faults, and a new one after a test has failed."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from tests.support.fault_cluster import FaultCluster
from tests.support.fault_episode import END_WITHIN_S, WHOLE_WITHIN_S, run_episode
from tests.support.fault_load import ask, digest_question
from tests.support.fault_model import fault_config
from tests.support.fault_plan import PRESSED
from tests.support.fault_wire import why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fault_plan import Fault

UNDISTURBED = 12


class Arena:
    """A cluster that serves, kept from fault to fault."""

    def __init__(self, factory: pytest.TempPathFactory, *, networked: bool) -> None:
        self._factory = factory
        self._report = factory.getbasetemp() / "faults.jsonl"
        self._networked = networked
        self._cluster: FaultCluster | None = None
        self._cramped = False
        self._episodes = 0

    def suffer(self, fault: Fault) -> None:
        """Run one episode; fails with everything that was wrong."""
        cluster = self._running(cramped=fault.state in PRESSED)
        self._episodes += 1
        try:
            report = run_episode(cluster, fault, self._trace_file, seed=self._episodes)
            self._note(fault, report.counts() | {"problems": report.problems})
            assert not report.problems, "\n".join(report.problems)
        except BaseException as error:
            self._note(fault, {"failed": str(error)[:2000]})
            print(cluster.logs())  # noqa: T201
            self.close()
            raise

    def _note(self, fault: Fault, seen: dict[str, object]) -> None:
        """A line per episode, for whoever wants to know more than that it passed."""
        with self._report.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"fault": str(fault)} | seen) + "\n")

    def close(self) -> None:
        """End the cluster."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.__exit__(None, None, None)

    def _running(self, *, cramped: bool) -> FaultCluster:
        if self._cluster is not None and self._cramped is not cramped:
            self.close()
        if self._cluster is None:
            directory = self._factory.mktemp("faults")
            self._trace_file, self._cramped = directory / "trace", cramped
            cluster = FaultCluster(
                fault_config(str(self._trace_file)),
                directory,
                networked=self._networked,
                cramped=cramped,
            )
            self._cluster = cluster.__enter__()
            cluster.wait_whole(WHOLE_WITHIN_S)
            _assert_undisturbed(cluster)
        return self._cluster


def _assert_undisturbed(cluster: FaultCluster) -> None:
    """What the clients take for right is what this cluster says without a fault."""
    rng = random.Random(0)
    for _ in range(UNDISTURBED):
        outcome = ask(cluster.address, digest_question(rng), END_WITHIN_S)
        assert outcome.code == "OK", outcome
        assert outcome.tokens == outcome.question.expected


@pytest.fixture(scope="session")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """Workers on the loopback of this machine."""
    arena = Arena(tmp_path_factory, networked=False)
    yield arena
    arena.close()


@pytest.fixture(scope="session")
def many_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """Each worker in a network namespace of its own."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    arena = Arena(tmp_path_factory, networked=True)
    yield arena
    arena.close()
