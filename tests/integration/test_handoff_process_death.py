"""A peer process that is killed or stopped in the middle of a transfer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvferry.clock import MonotonicClock
from kvferry.generation import PrefillSource
from kvferry.ids import WorkerId
from kvferry.sampling import SamplingParams
from tests.support.handoff_child import (
    PLAIN_USE,
    PROMPT,
    SINK_INCARNATION,
    SOURCE_INCARNATION,
    child_key,
    compute_step,
    new_worker,
)
from tests.support.handoff_pair import LoopThread

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


@pytest.fixture
def make_worker():
    """Workers of this process, closed at the end whatever happened."""
    loop, workers = LoopThread(), []

    def make(name, incarnation):
        workers.append(new_worker(name, incarnation, loop))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()
    loop.stop()


@pytest.fixture
def start_child():
    children = []

    def start(*arguments):
        command = [sys.executable, "-m", "tests.support.handoff_child", *arguments]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        children.append(child)
        return child, child.stdout.readline().strip()

    yield start
    for child in children:
        child.kill()
        child.wait(60)
        child.stdout.close()


def run_until(worker, condition) -> float:
    """Step the worker until it holds; how long that took, in seconds."""
    clock, pause = MonotonicClock(), threading.Event()
    started = clock.now()
    while not condition():
        if not worker.step():
            compute_step(worker)
            assert clock.now() - started < PATIENCE_S, "it never happened"
            pause.wait(0.005)
    return clock.now() - started


def assert_idle(worker) -> None:
    assert worker.driver.handoffs_open() == 0
    assert worker.kv_cache.accounts().is_idle
    worker.kv_cache.audit()


SIGNALS = [
    pytest.param(signal.SIGKILL, 5.0, id="killed"),
    # Stopped: the connection stays, so the session's keepalive has to notice.
    pytest.param(signal.SIGSTOP, 9.0, id="stopped", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("how", "within_s"), SIGNALS)
def test_the_source_process_goes_away(make_worker, start_child, how, within_s):
    child, address = start_child("source")
    worker = make_worker("sink", SINK_INCARNATION)
    key = child_key()
    worker.sink.prompts[key] = PROMPT
    source = PrefillSource(WorkerId("source"), address, SOURCE_INCARNATION)
    worker.driver.fetch(key, source, PROMPT, SamplingParams(), PLAIN_USE)
    run_until(worker, lambda: worker.driver.counters["chunks_received"] > 3)
    os.kill(child.pid, how)
    took = run_until(worker, lambda: key in worker.sink.errors)
    assert took < within_s
    assert worker.sink.errors[key].status.retryable
    assert_idle(worker)


@pytest.mark.parametrize(("how", "within_s"), SIGNALS)
def test_the_sink_process_goes_away(make_worker, start_child, how, within_s):
    worker = make_worker("source", SOURCE_INCARNATION)
    child, _ = start_child("sink", worker.address)
    key = child_key()
    run_until(worker, lambda: worker.driver.counters["chunks_sent"] > 3)
    os.kill(child.pid, how)
    took = run_until(worker, lambda: key in worker.source.ends)
    assert took < within_s
    # Closed, if everything was with the link by then: the receipt might have been under way.
    assert worker.source.ends[key].startswith(("cancelled", "closed"))
    assert_idle(worker)
