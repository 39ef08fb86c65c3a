from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cluster import client as client_module
from cluster.client import QUIET_MAX_S, CallFailed, Client
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.rpc.v1 import inference_pb2_grpc
from router.api import grpc_server
from tests.support.ports import free_port

_SERVER = """
import concurrent.futures, grpc, threading
from kvferry.rpc.v1 import inference_pb2, inference_pb2_grpc
class Inference(inference_pb2_grpc.InferenceServicer):
    def Generate(self, request, context):
        yield inference_pb2.GenerateResponse(text="first")
        threading.Event().wait()
options = [("grpc.http2.min_ping_interval_without_data_ms", 10)]
server = grpc.server(concurrent.futures.ThreadPoolExecutor(1), options=options)
inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""


@pytest.fixture
def quiet_router():
    """A server in a process of its own, whose answers begin and never end: process, address."""
    process = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, f"127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_router_that_falls_silent_ends_the_answer(quiet_router, monkeypatch):
    monkeypatch.setattr(client_module, "_PING_TIMEOUT_S", 0.3)
    process, address = quiet_router
    with Client(address, quiet_max_s=0.2) as client:
        answer = client.generate(inference.GenerateRequest(text="hello"))
        assert next(answer).text == "first"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(CallFailed):
            next(answer)


def test_the_router_allows_what_its_client_asks():
    options = dict(grpc_server.server_options(shares_ports=False))
    allowed_ms = options["grpc.http2.min_ping_interval_without_data_ms"]
    assert allowed_ms < 1000 * QUIET_MAX_S


_TOKENS = list(range(12))


class Routers:
    """Servers with one answer, each of which may break it off after so many tokens."""

    def __init__(self):
        self.servers = []
        self.asked = []

    def start(self, breaks_after=None, code=grpc.StatusCode.UNAVAILABLE):
        number = len(self.servers)

        class Inference(inference_pb2_grpc.InferenceServicer):
            def Generate(_, request, context):
                self.asked.append((number, request))
                for count, token in enumerate(_TOKENS):
                    if count == breaks_after:
                        context.abort(code, "the router is stopping")
                    yield inference.GenerateResponse(token_ids=[token], text=f"{token} ")
                last = inference.GenerateResponse()
                last.finish.usage.completion_tokens = len(_TOKENS)
                yield last

            def ModelInfo(_, request, context):
                return inference.ModelInfoResponse(model=f"of {number}")

        class Admin(inference_pb2_grpc.AdminServicer):
            def AddWorker(_, request, context):
                return inference.AddWorkerResponse(worker_id=f"{request.role}-{number}")

        server = grpc.server(ThreadPoolExecutor(2))
        inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), server)
        inference_pb2_grpc.add_AdminServicer_to_server(Admin(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self.servers.append(server)
        return f"127.0.0.1:{port}"


@pytest.fixture
def routers():
    made = Routers()
    yield made
    for server in made.servers:
        server.stop(None).wait()


def answer_of(client, **sampling):
    request = inference.GenerateRequest(text="hello", sampling=sampling)
    parts = list(client.generate(request))
    return [token for each in parts for token in each.token_ids], parts[-1].finish.usage


def test_a_request_not_begun_goes_to_the_next_router(routers):
    gone, there = f"127.0.0.1:{free_port()}", routers.start()
    with Client(gone, there) as client:
        assert answer_of(client)[0] == _TOKENS
        assert client.model_info().model == "of 0"
        assert client.add_worker("decode") == "decode-0"


def test_an_answer_that_breaks_off_goes_on_where_it_did(routers):
    with Client(
        routers.start(breaks_after=5), routers.start(breaks_after=9), routers.start()
    ) as client:
        tokens, usage = answer_of(client)
    assert tokens == _TOKENS
    assert usage.completion_tokens == len(_TOKENS)
    assert [number for number, _ in routers.asked] == [0, 1, 2]
    seeds = {request.sampling.seed for _, request in routers.asked}
    assert len(seeds) == 1, "every router must draw alike"


def test_a_seed_that_is_given_stays(routers):
    with Client(routers.start(breaks_after=1), routers.start()) as client:
        answer_of(client, seed=7)
    assert {request.sampling.seed for _, request in routers.asked} == {7}


def test_routers_that_bring_nothing_new_are_not_asked_for_ever(routers):
    stopping = [routers.start(breaks_after=3) for _ in range(2)]
    with Client(*stopping) as client, pytest.raises(CallFailed, match="the router is stopping"):
        answer_of(client)
    assert len(routers.asked) == 3


def test_a_refusal_is_the_answer(routers):
    refusing = routers.start(breaks_after=0, code=grpc.StatusCode.RESOURCE_EXHAUSTED)
    with Client(refusing, routers.start()) as client, pytest.raises(CallFailed, match="EXHAUSTED"):
        answer_of(client)
    assert [number for number, _ in routers.asked] == [0]


def test_nobody_there_names_the_last_one():
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with Client(*addresses) as client, pytest.raises(CallFailed, match=addresses[1]):
        client.model_info()
