"""Workers of one machine, of which every time can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvferry.ids import WorkerId
from router.request import ServiceClass
from simulator.attempt import Asked
from simulator.settings import SimSettings, WorkerDeath
from simulator.simulation import Simulation
from simulator.step_times import StepTimes

TIMES = StepTimes(
    prompt_step_s=0.0,
    prompt_token_s=0.001,
    decode_step_s=0.1,
    sequence_s=0.0,
    context_token_s=0.0,
    transfer_s=0.0,
    bytes_per_s=1e12,
    kv_bytes_per_token=1,
    request_s=0.0,
    hop_s=0.0,
    prompt_beside=0.5,
    decode_beside=1.0,
)
PAIR = SimSettings(
    page_size=16, kv_tokens=1024, chunk_tokens=100, event_delay_s=0.0, workers_per_host=2
)


def asked(index: int, at_s: float, prompt: int, answer: int) -> Asked:
    first = 1000 * index
    ids = np.arange(first, first + prompt // 16 + 1, dtype=np.int32)
    return Asked(index, at_s, prompt, answer, ids, ServiceClass.STANDARD)


def test_a_prompt_and_an_answer_slow_one_another():
    load = [asked(0, 0.0, 100, 11), asked(1, 0.25, 100, 1)]
    simulation = Simulation(PAIR, TIMES, 128)
    columns = simulation.run(iter(load))
    # Alone 0.1 s; beside the answer, half as much more.
    assert columns.ttft_s().tolist() == pytest.approx([0.1, 0.15])
    # Ten steps of 0.1 s. The one under way when the prompt came is not changed, the next one,
    # which begins beside it, takes twice as long, and then the prompt is computed.
    assert columns.column("end_s")[0] == pytest.approx(0.1 + 10 * 0.1 + 0.1)
    simulation.check_idle()


def test_workers_of_different_hosts_do_not():
    load = [asked(0, 0.0, 100, 11), asked(1, 0.25, 100, 1)]
    columns = Simulation(replace(PAIR, workers_per_host=1), TIMES, 128).run(iter(load))
    assert columns.ttft_s().tolist() == pytest.approx([0.1, 0.1])
    assert columns.column("end_s")[0] == pytest.approx(1.1)


def test_who_is_dead_slows_nobody():
    load = [asked(0, 0.0, 1000, 1), asked(1, 0.0, 100, 1)]
    settings = replace(PAIR, prefill=2, workers_per_host=3, chunk_tokens=1000)
    deaths = [WorkerDeath(WorkerId("prefill-0"), 0.05), WorkerDeath(WorkerId("prefill-1"), 0.05)]
    simulation = Simulation(settings, TIMES, 1024)
    assert TIMES.beside(2).prompt_token_s == pytest.approx(0.002)
    simulation.run(iter(load), deaths, until_s=0.06)
    (worker,) = simulation.workers.values()
    # It would compute as if it were alone.
    host = simulation.host_of(worker.info.worker_id)
    assert host.times(worker) == TIMES
