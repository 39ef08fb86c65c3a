"""SIGTERM while answers run, and while somebody reads the logs."""

from __future__ import annotations

import json
import signal
import subprocess

import httpx

from cluster.client import Client
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.local_cluster import local_cluster
from tests.support.waiting import wait_until

ENDLESS = {"model": "SmolLM2-135M-Instruct", "prompt": "Three rivers:", "max_tokens": 3000}
ENDLESS |= {"ignore_eos": True, "stream": True}


def test_who_is_nearly_done_is_finished_others_are_told_and_readers_of_logs_are_left_alone():
    request = inference.GenerateRequest(
        text="Three rivers:",
        sampling=inference.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    )
    with local_cluster() as running:
        log = next((running.directory / "session_latest" / "logs").glob("worker-*"))
        completions = f"{running.openai_url}/completions"
        with (
            subprocess.Popen(["tail", "-f", log], stdout=subprocess.DEVNULL) as reader,
            httpx.Client(timeout=60) as http,
            Client(running.address) as client,
            http.stream("POST", completions, json=ENDLESS) as endless,
        ):
            events = (line for line in endless.iter_lines() if line)
            next(events)
            answer = client.generate(request)
            first = next(answer)
            running.process.send_signal(signal.SIGTERM)
            refusals = []

            def is_refused():
                refusals[:] = [http.post(completions, json=ENDLESS | {"max_tokens": 1})]
                return refusals[0].status_code == 503

            wait_until("a refusal", is_refused, 30, state=lambda: refusals)
            responses = [first, *answer]
            *_, last = events
            running.process.wait(timeout=40.0)
            ended_by_itself = reader.poll()
            reader.kill()
    assert refusals[0].headers["Retry-After"] == "1"
    assert "shutting down" in refusals[0].json()["error"]["message"]
    assert sum(len(response.token_ids) for response in responses) == 12
    assert responses[-1].finish.reason == inference.FINISH_REASON_LENGTH
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert ended_by_itself is None
