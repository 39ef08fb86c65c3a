"""Two routers over the same workers: what one has sent is known to the other before it is computed.

All is real but the arithmetic; steps of prefill workers wait until the test lets them go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_transfer.events import MessageCame
from kv_transfer.protocol.messages import Abort, Prefill
from kvferry.clock import ManualClock
from kvferry.membership import Membership, Role
from kvferry.sampling import SamplingParams
from router.policies.catalogue import Policy
from router.policy import Demand, Placement
from router.prompt_keys import prompt_keys
from router.request import ClientRequest, TokenInput
from router.validation import cache_use_of
from tests.integration.test_routers_and_workers import CONFIG, PAGE, indexed, router_of
from tests.support.chosen_route import choose_route
from tests.support.digest_cluster import digest_cluster
from tests.support.waiting import HANG_GUARD_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from cluster.worker_process import WorkerProcess
    from router.policies.pool import PoolView, Prompt
    from router.prefix_index import IndexReport
    from router.request import Usage
    from router.router import Router
    from tests.support.in_process_cluster import InProcessCluster

CHUNK = 2 * PAGE
WORKERS = replace(CONFIG, scheduler=replace(CONFIG.scheduler, chunk_tokens=CHUNK))
"""Routers give a worker more than what one of its steps computes, while it waits for that step."""
SHARED = [40 + number % 7 for number in range(5 * PAGE)]


@dataclass(eq=False)
class Gate:
    """Where the steps of a prefill worker wait, and what other workers have told it."""

    worker: WorkerProcess
    steps: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waiting: int = 0
    heard: list[type] = field(default_factory=list)

    def __post_init__(self) -> None:
        loop, runner = self.worker._step_loop, self.worker._runner
        self._post, self._forward = loop.post, runner.forward
        loop.post, runner.forward = self.post, self.forward

    def post(self, event: object) -> None:
        self._post(event)
        if isinstance(event, MessageCame):
            self.heard.append(type(event.message))

    def forward(self, *arguments: Any) -> Any:
        self.waiting += 1
        assert self.steps.acquire(timeout=4 * HANG_GUARD_S), "nobody opened the gate"
        self.waiting -= 1
        return self._forward(*arguments)

    def remove(self) -> None:
        """Lets all steps go on."""
        self.worker._step_loop.post, self.worker._runner.forward = self._post, self._forward
        self.steps.release(100)


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with digest_cluster(WORKERS, (Role.PREFILL, Role.PREFILL, Role.DECODE)) as running:
        yield running


@pytest.fixture
def gates(cluster: InProcessCluster) -> Iterator[list[Gate]]:
    made = [Gate(worker) for worker in cluster.workers[:2]]
    try:
        yield made
    finally:
        for gate in made:
            gate.remove()


@contextlib.contextmanager
def listening_to(cluster: InProcessCluster) -> Iterator[tuple[Router, ManualClock]]:
    """A further router, which remembers prompts for as long as its clock stands."""
    with router_of(cluster) as router:
        chooser = router._attempts._chooser
        # By the fleet's clock its workers have joined before.
        clock = chooser._clock = ManualClock(chooser._clock.now())
        yield router, clock


def request_of(ids: list[int]) -> ClientRequest:
    return ClientRequest(
        request_id="".join(map(str, ids[-PAGE:])),
        model="",
        input=TokenInput(np.array(ids, dtype=np.int32)),
        sampling=SamplingParams(max_tokens=2, ignore_eos=True),
    )


def send(cluster: InProcessCluster, router: Router, ids: list[int]) -> Future[Usage]:
    async def answer() -> Usage:
        async with contextlib.aclosing(router.generate(request_of(ids))) as chunks:
            finishes = [chunk.finish async for chunk in chunks if chunk.finish is not None]
        return finishes[-1].usage

    return asyncio.run_coroutine_threadsafe(answer(), cluster._loop)


def heard(router: Router) -> int:
    """How many prompts it was told of, by prefill workers all of which it hears."""

    def report() -> IndexReport:
        return router.fleet.index_reports()["prefill"]

    wait_until("snapshots", lambda: report().known_workers == report().workers)
    return report().counts.expected


def queued(router: Router) -> list[int]:
    """Prompt tokens that each prefill worker has to compute."""
    return router.fleet.view(()).prefill.loads.prefill_tokens.tolist()


def counted(cluster: InProcessCluster, router: Router, ids: list[int]) -> list[int]:
    """Leading tokens that the policy takes each prefill worker to hold, or to be about to."""
    keys = prompt_keys(ids, PAGE, cache_use_of(request_of(ids), router._weights).extra_key)

    seen: list[int] = []

    def costs(pool: PoolView, _prompt: Prompt) -> NDArray[np.float64]:
        seen.extend(pool.hit_tokens.tolist())
        return pool.queue_ms

    async def look() -> list[int]:
        chooser = router._attempts._chooser
        prompt: Prompt = chooser._prompt_of(len(ids), keys)
        spy = Placement(Policy(costs), prompt, chooser._history, chooser._clock.now())
        view, demand = router.fleet.view(keys), Demand(len(ids), 1)
        choose_route(view, demand, chooser._model, frozenset(), random.Random(0), spy)
        return seen

    return cluster._run(look())


def test_a_prompt_is_known_to_the_other_router_before_it_is_computed(
    cluster: InProcessCluster, gates: list[Gate]
) -> None:
    first, second = (SHARED + [number] * PAGE for number in (50, 51))
    with router_of(cluster) as one, listening_to(cluster) as (other, _):
        before = heard(other)
        sent = send(cluster, one, first)
        wait_until("the step of the first prompt", lambda: sum(g.waiting for g in gates) == 1)
        wait_until("what its worker tells", lambda: heard(other) == before + 1)

        # What it has to do is a reason to go elsewhere.
        wait_until("its load", lambda: sorted(queued(other)) == [0, len(first)])
        assert sorted(counted(cluster, other, first)) == [0, len(first)]
        assert not any(indexed(other, info) for info in cluster.infos), "nothing is computed"
        follows = send(cluster, other, second)
        wait_until("its arrival", lambda: sum(g.heard.count(Prefill) for g in gates) == 2)
        for gate in gates:
            gate.remove()
        usages = [future.result(HANG_GUARD_S) for future in (sent, follows)]
    assert len({usage.prefill_worker for usage in usages}) == 1
    assert [usage.kv.prefill_hit_tokens for usage in usages] == [0, len(SHARED)]


def test_a_prompt_that_was_aborted_is_forgotten(
    cluster: InProcessCluster, gates: list[Gate]
) -> None:
    gate = gates[0]
    long, aborted = [60] * (2 * CHUNK + PAGE), [61] * (6 * PAGE)
    with router_of(cluster) as one, listening_to(cluster) as (other, clock):
        for router in (one, other):
            infos = (cluster.infos[0], cluster.infos[2])
            cluster._run(router.set_membership(Membership(2, infos)))
        before = heard(other)
        computed = send(cluster, one, long)
        wait_until("its first step", lambda: gate.waiting == 1)
        send(cluster, one, aborted)
        wait_until("its arrival", lambda: gate.heard.count(Prefill) == 2)
        gate.steps.release()
        wait_until("what its worker tells", lambda: heard(other) == before + 2)
        assert counted(cluster, other, aborted) == [len(aborted)]
        assert one.cancel(request_of(aborted).request_id)
        wait_until("the abort", lambda: Abort in gate.heard)
        gate.remove()
        computed.result(HANG_GUARD_S)
        wait_until("an idle worker", lambda: queued(other) == [0])
        assert counted(cluster, other, aborted) == [len(aborted)], "an event may tell of it yet"
        clock.advance(1.01)
        assert counted(cluster, other, aborted) == [0]
        wait_until("the other one's blocks", lambda: counted(cluster, other, long) == [len(long)])
    cluster.wait_idle()
