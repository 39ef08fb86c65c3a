"""A whole cluster in one process: real gRPC, real links, real model, no Ray.

Starts in a second, so that many configurations can be tried. Processes that die are tested in
`tests/cluster`.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import grpc

from cluster.worker_process import WorkerProcess
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.convert import accounts_from_wire
from kvferry.ids import WorkerId
from kvferry.membership import Membership, Role, WorkerInfo
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.rpc.v1 import inference_pb2_grpc
from router.api.door_settings import DoorSettings
from router.api.grpc_server import serve
from router.api.request_metrics import RequestMetrics
from router.router import Router
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from kvferry.accounts import KvAccounts
    from kvferry.config import ClusterConfig
    from router.worker_client import WorkerClient


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything one stream said."""

    token_ids: tuple[int, ...]
    text: str
    finish: inference.Finish


class InProcessCluster:
    """One router and the given workers, as a context manager."""

    def __init__(
        self,
        config: ClusterConfig,
        roles: Sequence[Role],
        connect: Callable[[WorkerInfo], WorkerClient] | None = None,
    ) -> None:
        """`connect`: what the router calls workers with; None: as the product does."""
        self._config = config
        self._connecting = {} if connect is None else {"connect": connect}
        self.workers = [
            WorkerProcess(config, WorkerId(f"{role.value}-{number}"), role)
            for number, role in enumerate(roles)
        ]
        self.infos: list[WorkerInfo] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.infos = [worker.start() for worker in self.workers]
        directory = resolve_model(self._config.model.path)
        self.router = Router(
            self._config, directory, MonotonicClock(), random.Random(0), **self._connecting
        )
        self._run(self.router.start())
        self._run(self.router.set_membership(Membership(1, tuple(self.infos))))
        # The router does not wait long for workers that are slow to answer on a busy machine.
        wait_until("workers answer", self._all_answer)
        self.doors = DoorSettings(self.router, RequestMetrics(self.router, MonotonicClock()))
        self._server, port = self._run(serve(self.doors, ("127.0.0.1", 0)))
        self.address = f"127.0.0.1:{port}"
        self._channel = grpc.insecure_channel(self.address)
        self.stub = inference_pb2_grpc.InferenceStub(self._channel)
        self.admin = inference_pb2_grpc.AdminStub(self._channel)
        return self

    def _all_answer(self) -> bool:
        return all(worker.is_reachable for worker in self.router.fleet.summaries())

    def __exit__(self, *exc: object) -> None:
        self._channel.close()
        self._run(self._server.stop(0.5))
        self._run(self.router.stop())
        for worker in self.workers:
            worker.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()
        # Engine, driver and roles refer to one another: give hundreds of MB of KV back now.
        self.workers.clear()
        gc.collect()

    def generate(
        self, ids: Sequence[int], max_tokens: int, model: str = "", **sampling: Any
    ) -> Answer:
        """Answer one prompt, greedily unless told otherwise."""
        params = {"temperature": 0.0, "ignore_eos": True} | sampling
        request = inference.GenerateRequest(
            model=model,
            token_ids=inference.TokenIds(ids=ids),
            sampling=inference.SamplingParams(max_tokens=max_tokens, **params),
        )
        return collect(self.stub.Generate(request, timeout=300))

    def generate_samples(
        self, ids: Sequence[int], n: int, max_tokens: int, **sampling: Any
    ) -> list[Answer]:
        """`n` answers to one prompt, by sample."""
        params = {"temperature": 0.0, "ignore_eos": True} | sampling
        request = inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=ids),
            sampling=inference.SamplingParams(max_tokens=max_tokens, n=n, **params),
        )
        responses = list(self.stub.Generate(request, timeout=300))
        assert {response.index for response in responses} == set(range(n))
        return [collect(r for r in responses if r.index == sample) for sample in range(n)]

    def counters(self) -> Counter[str]:
        """What all workers together counted since their start."""
        total: Counter[str] = Counter()
        for worker in self.workers:
            total.update(worker.snapshot().counters)
        return total

    def generate_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int
    ) -> list[Answer]:
        """Answer all prompts, `at_once` of them in flight."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda ids: self.generate(ids, max_tokens), prompts))

    def accounts(self) -> dict[str, KvAccounts]:
        """The accounts of every worker, by worker id, as the router reports them."""
        status = self.admin.ClusterStatus(inference.ClusterStatusRequest(), timeout=60)
        return {entry.worker_id: accounts_from_wire(entry.accounts) for entry in status.workers}

    def wait_idle(self) -> None:
        """Fail unless every worker comes back to its idle accounts."""
        wait_until(
            "idle accounts",
            lambda: all(entry.is_idle for entry in self._engine_accounts()),
            state=self._engine_accounts,
        )

    def _engine_accounts(self) -> list[KvAccounts]:
        # Read at the source: the router's figures are as old as its last poll.
        return [worker.snapshot().accounts for worker in self.workers]

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)


def collect(stream: Any) -> Answer:
    """Read a stream to its end."""
    ids: list[int] = []
    text: list[str] = []
    finish = inference.Finish()
    for response in stream:
        ids += response.token_ids
        text.append(response.text)
        if response.HasField("finish"):
            finish = response.finish
    return Answer(tuple(ids), "".join(text), finish)
