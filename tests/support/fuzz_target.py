"""A router with both front doors and real workers of a tiny model, for whoever sends anything."""

from __future__ import annotations

import gc
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.model_directory import resolve_model
from engine.request import Request
from kvferry.config import CacheConfig, ClusterConfig, ModelConfig
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2 as inference
from router.api.http_server import serve_http
from router.request_control import RequestControl
from router.response_stream import ResponseStream
from tests.support.in_process_cluster import InProcessCluster
from tests.support.tiny_llama import make_tiny_llama
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OF_ONE_REQUEST = (RequestControl, ResponseStream, Request)

FILES_GROWN_MAX = 32
"""Some are opened by the first message of their kind: links, a process that checks constraints."""


@dataclass(frozen=True, slots=True)
class FuzzTarget:
    """Where to send, as of a `RouterBench`."""

    channel_target: str
    http_url: str
    cluster: InProcessCluster

    def assert_nothing_left(self) -> None:
        """No request runs, waits or is remembered; every slot is where it was at the start."""
        router = self.cluster.router
        wait_until("an idle router", lambda: router.requests_in_flight == 0)
        classes = router.admission_snapshot().classes.values()
        assert [(each.waiting, each.running) for each in classes] == 3 * [(0, 0)]
        self.cluster.wait_idle()
        wait_until("no attempts", lambda: self._tokens_in_flight() == 0)
        audit = self.cluster.admin.Audit(inference.AuditRequest(), timeout=30)
        assert [list(entry.report.violations) for entry in audit.audits] == [[], []]
        wait_until("requests forgotten", lambda: not _remembered(), state=_remembered)

    def _tokens_in_flight(self) -> int:
        fleet = self.cluster.router.fleet
        return sum(fleet.tokens_in_flight(info.worker_id) for info in self.cluster.infos)


def open_files() -> int:
    """Of this process: sockets, mostly."""
    return len(os.listdir("/proc/self/fd"))


def _remembered() -> list[str]:
    """Objects of requests that are alive."""
    gc.collect()
    # To ask an object for its class has some of those of libraries do things; its type does not.
    return [type(each).__name__ for each in gc.get_objects() if type(each) in _OF_ONE_REQUEST]


@contextmanager
def fuzz_target(directory: Path) -> Iterator[FuzzTarget]:
    """One prefill and one decode worker with a context of 128 tokens, audited at every change."""
    tokenizer = resolve_model(ModelConfig().path)
    model = make_tiny_llama(directory / "model", tokenizer_from=tokenizer)
    config = ClusterConfig(
        model=ModelConfig(path=str(model), context_length=128),
        cache=CacheConfig(memory_bytes=4 * 2**20, audit=True),
    )
    with InProcessCluster(config, (Role.PREFILL, Role.DECODE)) as cluster:
        door, port = cluster._run(serve_http(cluster.doors, ("127.0.0.1", 0)))
        try:
            yield FuzzTarget(cluster.address, f"http://127.0.0.1:{port}", cluster)
        finally:
            cluster._run(door.stop())
