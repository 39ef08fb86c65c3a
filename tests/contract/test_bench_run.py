"""`kvferry bench run` as a user calls it, against a router with scripted workers, by both doors."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bench.client_process import endpoint_of
from bench.plan import Door, EndpointPlan, LoadPlan, RunPlan
from bench.record import LoadMode, Outcome, read_record
from bench.sender import Sender
from bench.workload import Planned, Workload
from kvferry.clock import MonotonicClock
from kvferry.errors import InternalError
from kvferry.generation import AttemptUsage
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import SERVED
from tests.support.router_model import VOCAB_SIZE
from tests.support.served_router import served_router

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.router_bench import RouterBench

ANSWER = (65, 66, 67, 68, 69)
USAGE = AttemptUsage(prefill_hit_tokens=12, moved_tokens=8, moved_bytes=4096)
SHORT = ("--requests", "12", "--rate", "100", "--prompt-tokens", "20", "--answer-tokens", "5")
TIMEOUT_S = 60.0
BUG = InternalError("scripted")


def command(*flags: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "cluster.cli", "bench", "run", *flags]


def ran(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*flags), capture_output=True, text=True, timeout=TIMEOUT_S)


def door_of(bench: RouterBench, name: str) -> tuple[str, ...]:
    if name == "grpc":
        return ("--address", bench.channel_target)
    return ("--http", f"{bench.http_url}/v1", "--vocab-size", str(VOCAB_SIZE))


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_a_run_leaves_a_record_of_every_request(directory: Path, tmp_path: Path, door: str):
    worker = FakeWorker("w0", script=lambda _: Script(ANSWER, usage=USAGE))
    out = tmp_path / "run.json"
    with served_router(directory, worker, requests_max=50) as bench:
        done = ran(
            *door_of(bench, door), *SHORT, "--clients", "2", "--json",
            "--targets", "ttft=30s,itl=30s", "--out", str(out),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = read_record(out)
    assert json.loads(done.stdout)["requests"] == {
        "all": 12, "done": 12, "refused": 0, "failed": 0, "cancelled": 0,
    }  # fmt: skip
    requests = record.requests
    assert requests.index.tolist() == list(range(12))
    assert requests.prompt_tokens.tolist() == [20] * 12
    assert requests.cached_tokens.tolist() == [12] * 12
    assert requests.answer_tokens.tolist() == [5] * 12
    assert record.summary["goodput"]["share"] == 1.0
    assert record.about.endpoint == door
    assert record.about.machine["cores"] > 0
    if door == "grpc":
        assert requests.moved_bytes.tolist() == [4096] * 12
        assert set(requests.decode_worker) == {"w0"}
        assert record.about.config["workers"] == [{"worker_id": "w0", "role": "both"}]
    # Both clients asked for other prompts; the router saw each of them once.
    prompts = {tuple(request.prompt.tolist()) for request in worker.requests}
    assert len(prompts) == len(worker.requests) == 12


def test_ctrl_c_leaves_a_record_that_says_so(directory: Path, tmp_path: Path):
    worker = FakeWorker("w0", script=lambda _: Script(ANSWER, hang_after=2))
    out = tmp_path / "run.json"
    with served_router(directory, worker, requests_max=50) as bench:
        flags = (*door_of(bench, "grpc"), *SHORT, "--out", str(out))
        process = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + TIMEOUT_S  # noqa: TID251 - of the test itself
            while len(worker.requests) < 12:
                assert time.monotonic() < deadline  # noqa: TID251
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            text, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 130
    assert "interrupted" in text
    record = read_record(out)
    assert record.about.interrupted
    assert record.summary["requests"]["cancelled"] == 12
    assert (record.requests.answer_tokens <= 2).all()


@pytest.mark.parametrize(("door", "code"), [(Door.GRPC, "INVALID_ARGUMENT"), (Door.HTTP, "400")])
def test_what_is_refused_is_told_by_the_server_s_word(directory: Path, door: Door, code: str):
    with served_router(directory, FakeWorker("w0")) as bench:
        assert asyncio.run(asked(bench, door, [1] * 600)) == (Outcome.REFUSED, code)


@pytest.mark.parametrize("door", Door)
def test_an_answer_that_breaks_off_has_failed(directory: Path, door: Door):
    """Every attempt fails after two tokens, until the router has no more of them."""
    worker = FakeWorker("w0", script=lambda _: Script(ANSWER, fail_after=2, fail_with=BUG))
    with served_router(directory, worker) as bench:
        outcome, error = asyncio.run(asked(bench, door, [1] * 20))
    assert outcome is Outcome.FAILED
    assert error


async def asked(bench: RouterBench, door: Door, tokens: list[int]) -> tuple[Any, str | None]:
    """How one request ends, in this process."""
    address = bench.channel_target if door is Door.GRPC else f"{bench.http_url}/v1"
    endpoint_plan = EndpointPlan(door, (address,), model=SERVED)
    prompts = FixedPrompt(np.array(tokens, dtype=np.int32))
    workload = Workload("one", (Planned(0, 0, 5),), (0,), prompts)
    plan = RunPlan(endpoint_plan, load=LoadPlan(LoadMode.CLOSED), deadline_s=TIMEOUT_S)
    endpoint = endpoint_of(plan)
    try:
        sender = Sender(plan, workload, endpoint, MonotonicClock())
        await sender.run(0.0)
    finally:
        await endpoint.close()
    (answer,) = sender.answers
    return answer.outcome, answer.error


@dataclass(frozen=True)
class FixedPrompt:
    tokens: Any

    def prompt(self, _index: int) -> Any:
        return self.tokens
