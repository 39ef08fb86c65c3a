"""One real worker over a tiny model: how it ends, and how that is seen from outside."""

from __future__ import annotations

import dataclasses
import socket
import threading
from queue import SimpleQueue

import grpc
import numpy as np
import pytest

from cluster.worker_process import WorkerProcess
from kvferry.cache_key import CacheUse
from kvferry.config import load_config
from kvferry.convert import attempt_request_to_wire
from kvferry.errors import ConfigError, InternalError
from kvferry.generation import AttemptRequest
from kvferry.ids import Attempt, AttemptId, ExtraKey, RequestId, WorkerId
from kvferry.limits import ENGINE_TURN_MAX_S
from kvferry.membership import Role
from kvferry.rpc.v1 import worker_pb2, worker_pb2_grpc
from kvferry.sampling import SamplingParams
from tests.support.tiny_llama import TinyLlama, make_tiny_llama
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = make_tiny_llama(tmp_path_factory.mktemp("tiny"), TinyLlama(vocab_size=512))
    settings = {
        "model.path": str(directory),
        "model.context_length": "128",
        "cache.memory_bytes": str(2**20),
        "cache.rows": "4",
    }
    return load_config(None, {}, settings)


def new_worker(config):
    return WorkerProcess(config, WorkerId("both-0"), Role.BOTH)


@pytest.fixture
def worker(config):
    made = new_worker(config)
    info = made.start()
    yield made, info
    if not made._loop.is_closed():
        made.stop()


def test_cores_that_the_machine_does_not_have_are_refused_for_good(config):
    both = dataclasses.replace(config.workers.both, cores="9999")
    workers = dataclasses.replace(config.workers, both=both)
    made = new_worker(dataclasses.replace(config, workers=workers))
    with pytest.raises(ConfigError, match="there is no core 9999 here") as refused:
        made.start()
    assert refused.value.field == "workers.both.cores"
    made.stop()


def with_ranks(config, ranks):
    both = dataclasses.replace(config.workers.both, tensor_parallel=ranks)
    workers = dataclasses.replace(config.workers, both=both)
    return dataclasses.replace(config, workers=workers)


def test_ranks_that_would_cut_a_head_are_refused_by_name(config):
    made = new_worker(with_ranks(config, 4))
    with pytest.raises(ConfigError, match="is 4; must divide the model's 2 KV heads") as refused:
        made.start()
    assert refused.value.field == "workers.both.tensor_parallel"
    made.stop()


def test_ranks_end_with_their_worker(config):
    made = new_worker(with_ranks(config, 2))
    made.start()
    assert "rank-1" in {thread.name for thread in threading.enumerate()}
    assert len(made._kv_cache.rank_pools) == 2
    made.stop()
    assert "rank-1" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_that_fails_ends_the_engine_with_its_reason(config):
    made = new_worker(with_ranks(config, 2))
    info = made.start()

    def fail(batch):
        raise ValueError("out of luck")

    (follower,) = made._runner._ranks._followers
    follower._inbox.put(fail)
    with grpc.insecure_channel(info.address) as channel:
        attempt = AttemptRequest(
            id=AttemptId(RequestId("r1"), Attempt(1)),
            prompt=np.array([1, 2], np.int32),
            sampling=SamplingParams(max_tokens=4),
            cache_use=CacheUse(ExtraKey("")),
            source=None,
        )
        start = worker_pb2.StartAttempt(
            attempt=attempt_request_to_wire(attempt, info.incarnation), timeout_s=60.0
        )
        command = worker_pb2.AttemptCommand(number=1, start=start)
        commands = SimpleQueue()
        commands.put(worker_pb2.AttemptCommands(commands=[command]))
        stub = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Attempts(iter(commands.get, None), timeout=60.0)
        errors = next(events for events in call if events.errors).errors
        commands.put(None)
    assert "rank 1 failed: ValueError('out of luck')" in errors[0].message
    wait_until("engine ended", lambda: not made.is_alive())
    made.stop()


class FakeStepLoop:
    def __init__(self, seconds):
        self.seconds = seconds

    def is_alive(self):
        return True

    def seconds_since_turn(self):
        return self.seconds


@pytest.mark.parametrize(
    ("seconds", "alive"), [(ENGINE_TURN_MAX_S - 1, True), (ENGINE_TURN_MAX_S + 1, False)]
)
def test_an_engine_thread_that_hangs_is_not_alive(config, seconds, alive):
    made = new_worker(config)
    assert not made.is_alive(), "not started yet"
    made._step_loop = FakeStepLoop(seconds)
    assert made.is_alive() == alive
    made.stop()


def test_an_exception_on_the_engine_thread_is_seen_and_ends_what_waits_for_it(worker):
    made, info = worker
    assert made.is_alive()
    with grpc.insecure_channel(info.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        events = stub.KvEvents(worker_pb2.KvEventsRequest())
        next(events)
        made._step_loop.post("no part takes this")
        wait_until("engine ended", lambda: not made.is_alive())
        changes = [batch for batch in events if batch.events]
        assert changes == [], "the feed has told that there will be no more"
        for call in (
            lambda: list(stub.KvEvents(worker_pb2.KvEventsRequest(), timeout=60.0)),
            lambda: stub.Status(worker_pb2.WorkerStatusRequest(), timeout=60.0),
        ):
            with pytest.raises(grpc.RpcError) as failed:
                call()
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the engine has stopped" in failed.value.details()


def test_an_engine_that_cannot_be_stopped_keeps_nothing_else_from_ending(worker, monkeypatch):
    made, info = worker
    stop = made._step_loop.stop

    def stop_late():
        stop()
        raise InternalError("engine thread still in a step")

    monkeypatch.setattr(made._step_loop, "stop", stop_late)
    with pytest.raises(InternalError, match="still in a step"):
        made.stop()
    assert made._loop.is_closed()
    host, port = info.address.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=60.0)


def test_a_worker_that_cannot_start_can_be_stopped(config, monkeypatch):
    made = new_worker(config)

    def fail():
        raise InternalError("no model")

    monkeypatch.setattr(made, "_build", fail)
    with pytest.raises(InternalError):
        made.start()
    made.stop()
    assert made._loop.is_closed()
