"""SIGTERM while answers run, and while somebody reads the logs."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess

from cluster.client import Client
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.local_cluster import local_cluster
from tests.support.waiting import wait_until

ENDLESS = {"model": "SmolLM2-135M-Instruct", "prompt": "Three rivers:", "max_tokens": 3000}
ENDLESS |= {"ignore_eos": True, "stream": True}


@contextlib.contextmanager
def asking(url, question):
    """The response, whose connection is closed at the end."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/{path}/completions", json.dumps(question), headers)
    with contextlib.closing(connection):
        yield connection.getresponse()


def events_of(response):
    return (line.removeprefix(b"data: ") for line in response if line.strip())


def test_who_is_nearly_done_is_finished_others_are_told_and_readers_of_logs_are_left_alone():
    request = inference.GenerateRequest(
        text="Three rivers:",
        sampling=inference.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    )
    with local_cluster() as running:
        log = next((running.directory / "session_latest" / "logs").glob("worker-*"))
        with (
            subprocess.Popen(["tail", "-f", log], stdout=subprocess.DEVNULL) as reader,
            Client(running.address) as client,
            asking(running.openai_url, ENDLESS) as endless,
        ):
            events = events_of(endless)
            next(events)
            answer = client.generate(request)
            first = next(answer)
            running.process.send_signal(signal.SIGTERM)
            refusals = []

            def is_refused():
                with asking(running.openai_url, ENDLESS | {"max_tokens": 1}) as response:
                    refusals[:] = [(response.status, response.headers, response.read())]
                return response.status == 503

            wait_until("a refusal", is_refused, state=lambda: refusals)
            responses = [first, *answer]
            *_, last = events
            running.process.wait(timeout=40.0)
            ended_by_itself = reader.poll()
            reader.kill()
    ((_, headers, body),) = refusals
    assert headers["Retry-After"] == "1"
    assert "shutting down" in json.loads(body)["error"]["message"]
    assert sum(len(response.token_ids) for response in responses) == 12
    assert responses[-1].finish.reason == inference.FINISH_REASON_LENGTH
    assert json.loads(last)["error"]["code"] == "unavailable"
    assert ended_by_itself is None
