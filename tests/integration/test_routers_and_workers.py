"""Several routers over the same workers: what each knows of caches and load, by real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import SchedulerConfig
from kvferry.membership import Membership, Role, WorkerInfo
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.sampling import SamplingParams
from router.grpc_worker_client import GrpcWorkerClient
from router.request import ClientRequest, TokenInput
from router.router import Router
from tests.support.digest_cluster import digest_cluster, digest_config
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from kvferry.ids import WorkerId
    from kvferry.kv_events import KvEventBatch
    from router.worker_client import WorkerClient
    from tests.support.in_process_cluster import InProcessCluster

ROLES = (Role.PREFILL, Role.DECODE, Role.DECODE)
PAGE = 16
SLOTS = 64 * PAGE
CONFIG = digest_config(PAGE, SLOTS, scheduler=SchedulerConfig())
CONFIG = replace(CONFIG, router=replace(CONFIG.router, status_interval_s=0.1))


@dataclass(eq=False)
class Trouble:
    """What becomes of the KV events on their way to one router."""

    rng: random.Random = field(default_factory=lambda: random.Random(3))
    is_on: bool = True
    dropped: int = 0
    doubled: int = 0
    swapped: int = 0

    def connect(self, info: WorkerInfo) -> WorkerClient:
        """For the router."""
        return _TroubledClient(info, self)

    def copies(self) -> int:
        """Of a batch that came: how many of it arrive."""
        draw = self.rng.random() if self.is_on else 1.0
        self.dropped += draw < 0.1
        self.doubled += 0.1 <= draw < 0.25
        return 0 if draw < 0.1 else 2 if draw < 0.25 else 1

    def holds_back(self) -> bool:
        """Whether a batch arrives after the next one."""
        held = self.is_on and self.rng.random() < 0.1
        self.swapped += held
        return held


class _TroubledClient(GrpcWorkerClient):
    def __init__(self, info: WorkerInfo, trouble: Trouble) -> None:
        super().__init__(info)
        self._trouble = trouble

    async def kv_events(self) -> AsyncGenerator[KvEventBatch, None]:
        held: list[KvEventBatch] = []
        async for batch in super().kv_events():
            arriving = self._trouble.copies() * [batch]
            if not held and self._trouble.holds_back():
                held = arriving
                continue
            for each in (*arriving, *held):
                yield each
            held = []


@contextlib.contextmanager
def router_of(cluster: InProcessCluster, trouble: Trouble | None = None) -> Iterator[Router]:
    """A further router over the workers of `cluster`, on its loop."""
    connect = GrpcWorkerClient if trouble is None else trouble.connect
    directory = resolve_model(CONFIG.model.path)
    router = Router(CONFIG, directory, MonotonicClock(), random.Random(1), connect)
    cluster._run(router.start())
    cluster._run(router.set_membership(Membership(1, tuple(cluster.infos))))
    try:
        yield router
    finally:
        cluster._run(router.stop())


def indexed(router: Router, info: WorkerInfo) -> frozenset[int]:
    return router.fleet._index_of(info.role).blocks(info.worker_id)


def wait_for_the_truth(cluster: InProcessCluster, *routers: Router) -> None:
    """Every router knows what every worker's cache holds, before long."""
    cluster.wait_idle()
    truth = {
        info.worker_id: frozenset(worker._kv_cache.snapshot_blocks())
        for worker, info in zip(cluster.workers, cluster.infos, strict=True)
    }
    assert any(truth.values())
    for router in routers:

        def known(router: Router = router) -> bool:
            return all(indexed(router, info) == truth[info.worker_id] for info in cluster.infos)

        wait_until("the truth", known, state=router.fleet.index_reports)


def prompts(count: int, seed: int) -> list[list[int]]:
    """With a few beginnings in common, and more together than the caches hold."""
    rng = random.Random(seed)
    return [
        6 * PAGE * [rng.randrange(20, 24)] + [rng.randrange(20, 200) for _ in range(6 * PAGE)]
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with digest_cluster(CONFIG, ROLES) as running:
        yield running


def test_events_that_are_lost_doubled_and_swapped_leave_the_truth(
    cluster: InProcessCluster,
) -> None:
    trouble = Trouble()
    with router_of(cluster, trouble) as router:
        for turn in range(6):
            cluster.generate_all(prompts(10, turn), max_tokens=4, at_once=5)
        assert min(trouble.dropped, trouble.doubled, trouble.swapped) > 0
        trouble.is_on = False
        wait_for_the_truth(cluster, router, cluster.router)
        counts = [report.counts for report in router.fleet.index_reports().values()]
        assert sum(each.gaps for each in counts) > 0


def test_a_restarted_router_knows_all_at_once(cluster: InProcessCluster) -> None:
    cluster.generate_all(prompts(6, 90), max_tokens=4, at_once=3)
    for _ in range(2):
        with router_of(cluster) as router:
            wait_for_the_truth(cluster, router, cluster.router)
            reports = router.fleet.index_reports()
            assert {name: each.counts.gaps for name, each in reports.items()} == {
                "prefill": 0,
                "decode": 0,
            }
            assert sum(each.counts.snapshots for each in reports.values()) == len(ROLES)


def test_load_that_others_dispatched_is_seen(cluster: InProcessCluster) -> None:
    with router_of(cluster) as router:
        request = inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=list(range(100, 132))),
            sampling=inference.SamplingParams(max_tokens=SLOTS - 64, ignore_eos=True, n=2),
        )
        call = cluster.stub.Generate(request, timeout=60)
        next(call)

        def sequences() -> list[int]:
            return sorted(router.fleet.view(()).decode.loads.sequences.tolist())

        try:
            wait_until("load of another router", lambda: sequences() == [0, 2], state=sequences)
        finally:
            call.cancel()
        wait_until("its end", lambda: sequences() == [0, 0], state=sequences)


def test_a_worker_that_drains_finishes_what_it_has(cluster: InProcessCluster) -> None:
    with router_of(cluster) as router:
        decode = [info for info in cluster.infos if info.role is Role.DECODE]

        async def drain(*draining: WorkerInfo) -> None:
            infos = tuple(replace(info, is_draining=info in draining) for info in cluster.infos)
            await router.set_membership(Membership(router.fleet.membership_version + 1, infos))

        async def scenario() -> list[WorkerId | None]:
            await drain(decode[1])
            long = asyncio.create_task(_served_by(router, max_tokens=900))
            async with asyncio.timeout(60):
                while not router.fleet.view(()).decode.loads.sequences[0]:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await drain(decode[0])
            short = [await _served_by(router, max_tokens=2) for _ in range(3)]
            assert not long.done()
            return [*short, await long]

        assert cluster._run(scenario()) == [*3 * [decode[1].worker_id], decode[0].worker_id]


async def _served_by(router: Router, max_tokens: int) -> WorkerId | None:
    """The worker that decoded one request."""
    request = ClientRequest(
        request_id="",
        model="",
        input=TokenInput(np.arange(50, 90, dtype=np.int32)),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    tokens, finish = 0, None
    async with contextlib.aclosing(router.generate(request)) as chunks:
        async for chunk in chunks:
            tokens += len(chunk.tokens)
            finish = chunk.finish
    assert tokens == max_tokens
    assert finish is not None
    assert finish.usage is not None
    return finish.usage.decode_worker
