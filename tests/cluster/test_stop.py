"""Ctrl-C while an answer runs, and while somebody reads the logs."""

from __future__ import annotations

import signal
import subprocess

from cluster.client import Client
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.local_cluster import local_cluster


def test_an_answer_that_is_nearly_done_is_finished_and_readers_of_logs_are_left_alone():
    request = inference.GenerateRequest(
        text="Three rivers:",
        sampling=inference.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    )
    finish = inference.Finish()
    tokens = 0
    with local_cluster() as running:
        log = next((running.directory / "session_latest" / "logs").glob("worker-*"))
        with subprocess.Popen(["tail", "-f", log], stdout=subprocess.DEVNULL) as reader:
            with Client(running.address) as client:
                for response in client.generate(request):
                    if tokens == 0:
                        running.process.send_signal(signal.SIGINT)
                    tokens += len(response.token_ids)
                    if response.HasField("finish"):
                        finish = response.finish
            running.process.wait(timeout=30.0)
            ended_by_itself = reader.poll()
            reader.kill()
    assert tokens == 12
    assert finish.reason == inference.FINISH_REASON_LENGTH
    assert ended_by_itself is None
