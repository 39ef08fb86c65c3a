from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from cluster import client as client_module
from cluster.client import QUIET_MAX_S, CallFailed, Client
from kvferry.rpc.v1 import inference_pb2 as inference
from router.api import grpc_server

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
    allowed_ms = dict(grpc_server.SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"]
    assert allowed_ms < 1000 * QUIET_MAX_S
