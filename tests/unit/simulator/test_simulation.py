"""Small clusters, of which every time can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.errors import ConfigError
from kvferry.ids import WorkerId
from kvferry.router_config import PolicyName, ServiceClassConfig, ServiceClassesConfig
from router.request import ServiceClass
from simulator.attempt import Asked
from simulator.run_record import run_record
from simulator.settings import SimSettings, WorkerDeath
from simulator.simulation import Simulation
from simulator.step_times import StepTimes
from simulator.workload import generated

if TYPE_CHECKING:
    from bench.record import RunRecord

TIMES = StepTimes(
    prompt_step_s=0.0,
    prompt_token_s=0.001,
    decode_step_s=0.1,
    sequence_s=0.0,
    context_token_s=0.0,
    transfer_s=0.05,
    bytes_per_s=1e12,
    kv_bytes_per_token=1,
    request_s=0.0,
    hop_s=0.0,
)
"""A millisecond for each token of a prompt, a tenth of a second for each step of answers."""
SMALL = SimSettings(page_size=16, kv_tokens=1024, chunk_tokens=64, event_delay_s=0.0)


def asked(index: int, at_s: float, prompt: int, answer: int, first: int) -> Asked:
    ids = np.arange(first, first + prompt // 16 + 1, dtype=np.int32)
    return Asked(index, at_s, prompt, answer, ids, ServiceClass.STANDARD)


def close_to(*values: float) -> list[object]:
    return [pytest.approx(value, abs=1e-6) for value in values]


def test_what_no_worker_could_hold_is_refused():
    load = [asked(0, 0.0, 1000, 25, 100), asked(1, 0.0, 1000, 26, 300)]
    simulation = Simulation(SMALL, TIMES, 1026)
    columns = simulation.run(iter(load))
    simulation.check_idle()
    record = run_record(SMALL, TIMES, "two", {"mode": "open", "rate": 1.0}, columns)
    assert [each.value for each in record.requests.outcome] == ["done", "refused"]
    assert list(record.requests.error) == [None, "invalid_input"]


def test_three_requests_as_by_hand():
    load = [asked(0, 0.0, 64, 3, 100), asked(1, 0.0, 64, 3, 100), asked(2, 10.0, 32, 1, 200)]
    simulation = Simulation(SMALL, TIMES, 128)
    columns = simulation.run(iter(load))
    # The second waits until the worker has nothing to compute, and finds three of four pages.
    assert columns.column("first_token_s").tolist() == close_to(0.064, 0.080, 10.032)
    assert columns.column("cached_tokens").tolist() == [0, 48, 0]
    assert columns.column("moved_tokens").tolist() == [64, 64, 32]
    # Moved at 0.114 and 0.130; the second joins when the first step ends, at 0.214.
    assert columns.column("end_s").tolist() == close_to(0.314, 0.414, 10.082)
    simulation.check_idle()


def test_a_worker_of_both_roles_decodes_beside_prompts():
    settings = replace(SMALL, prefill=0, decode=0, both=1)
    load = [asked(0, 0.0, 64, 4, 100), asked(1, 0.07, 32, 1, 200)]
    columns = Simulation(settings, TIMES, 128).run(iter(load))
    # The first decodes from 0.064 on; at 0.164 the prompt joins a step of both, which takes 0.132.
    assert columns.column("first_token_s").tolist() == close_to(0.064, 0.296)
    assert columns.column("end_s").tolist() == close_to(0.396, 0.296)
    assert np.isnan(columns.column("moved_tokens")).all()


def test_who_lacks_pages_is_retracted_and_comes_back():
    """Both are let in by a promise that both outrun: 8 pages, of which each comes to hold 7."""
    settings = replace(
        SMALL, prefill=0, decode=0, both=1, kv_tokens=128, output_reserve=0.0, chunk_tokens=32
    )
    load = [asked(0, 0.0, 16, 97, 100), asked(1, 0.1, 16, 97, 200)]
    simulation = Simulation(settings, TIMES, 128)
    columns = simulation.run(iter(load))
    assert columns.texts("outcome") == ["done", "done"]
    (worker,) = simulation.workers.values()
    assert worker.counts.retractions == 1
    # The older one is not disturbed; 96 steps, of which one computes the other's prompt, too.
    first_end, second_end = columns.column("end_s").tolist()
    assert first_end == pytest.approx(0.016 + 9.6 + 0.016, abs=1e-6)
    assert second_end > first_end
    simulation.check_idle()


def test_a_full_queue_refuses():
    classes = ServiceClassesConfig(standard=ServiceClassConfig(queue_max=1))
    settings = replace(SMALL, classes=classes, requests_max=1)
    load = [asked(number, 0.001 * number, 64, 20, 100 * number) for number in range(4)]
    columns = Simulation(settings, TIMES, 128).run(iter(load))
    assert columns.texts("outcome") == ["done", "done", "refused", "refused"]
    assert columns.texts("error")[2:] == ["overloaded", "overloaded"]


@pytest.mark.parametrize("policy", [PolicyName.PRICED_TIME, PolicyName.CONSISTENT_HASHING])
def test_nothing_is_lost_and_equal_runs_are_equal(policy):
    workload = generated(60, 300, 40, seed=3)
    settings = SimSettings(
        prefill=3,
        decode=3,
        kv_tokens=4096,
        chunk_tokens=256,
        running_max=6,
        output_reserve=0.1,
        policy=policy,
        routers=2,
        local_prefill_tokens_max=32,
        seed=5,
    )

    def record() -> RunRecord:
        simulation = Simulation(settings, StepTimes(), workload.context_tokens)
        columns = simulation.run(workload.requests(60, 40.0, 16, seed=5))
        simulation.check_idle()
        return run_record(settings, StepTimes(), "generated", {"mode": "open"}, columns)

    one, two = record(), record()
    assert one.summary["requests"]["all"] == 60
    assert one.requests.done.all()
    for name in ("first_token_s", "end_s", "cached_tokens", "moved_tokens"):
        ours, again = getattr(one.requests, name), getattr(two.requests, name)
        np.testing.assert_array_equal(ours, again)


def test_a_request_is_explained_by_where_it_went():
    settings = replace(SMALL, prefill=3, decode=3)
    load = [asked(n, 0.02 * n, 64, 4, 100 + n % 2) for n in range(12)]
    simulation = Simulation(settings, TIMES, 128)
    simulation.explained = 7
    columns = simulation.run(iter(load))
    ((at_s, told),) = simulation.explanations
    assert at_s == pytest.approx(0.14)
    assert told.computing[0].computing == columns.texts("prefill_worker")[7]
    assert told.decoding[0].decode == columns.texts("decode_worker")[7]
    assert told.computing[0].cost <= told.computing[1].cost + 1e-6
    assert len(told.computing) == len(told.decoding) == 3


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ConfigError, match="decode"):
        replace(SMALL, prefill=0, decode=0).check()
    with pytest.raises(ConfigError, match="page_size"):
        replace(SMALL, page_size=8).check()
    with pytest.raises(ConfigError, match="routers"):
        replace(SMALL, routers=0).check()


def test_an_answer_goes_on_elsewhere_when_its_worker_dies():
    settings = replace(SMALL, decode=2, missed_after_s=0.5)
    load = [asked(0, 0.0, 64, 20, 100)]
    first = Simulation(settings, TIMES, 128).run(iter(load))
    (name,) = first.texts("decode_worker")
    simulation = Simulation(settings, TIMES, 128)
    columns = simulation.run(iter(load), [WorkerDeath(WorkerId(name), 1.0)])
    # Moved at 0.114. Nine tokens are there at 1.0; what they are is sent on at 1.5, by way of the
    # prefill worker, which holds the prompt and computes the eight tokens behind it.
    assert columns.texts("outcome") == ["done"]
    assert columns.texts("decode_worker") != [name]
    assert columns.column("attempts").tolist() == [2]
    assert columns.column("first_token_s").tolist() == close_to(0.064)
    assert columns.column("end_s").tolist() == close_to(1.5 + 0.008 + 0.05 + 11 * 0.1)
    assert simulation.failovers == 1
    simulation.check_idle()


def test_who_dies_comes_back_and_is_used():
    settings = replace(SMALL, prefill=1, decode=1, missed_after_s=0.1)
    load = [asked(n, 0.4 * n, 64, 4, 100 * n + 1) for n in range(12)]
    deaths = [WorkerDeath(WorkerId("prefill-0"), 1.0, back_after_s=0.2)]
    simulation = Simulation(settings, TIMES, 128)
    columns = simulation.run(iter(load), deaths)
    outcomes = columns.texts("outcome")
    assert outcomes.count("done") >= 10
    assert outcomes[-1] == "done"
    simulation.check_idle()


def test_snapshots_repair_what_lost_events_left_unknown():
    workload = generated(150, 3000, 10, seed=1)

    def hit_rate(loss: float) -> tuple[float, int]:
        settings = SimSettings(
            prefill=4, decode=2, kv_tokens=60_000, chunk_tokens=2048, event_loss=loss
        )
        simulation = Simulation(settings, StepTimes(), workload.context_tokens)
        columns = simulation.run(workload.requests(150, 5.0, 16, seed=1))
        simulation.check_idle()
        hits = columns.column("cached_tokens").sum() / columns.column("prompt_tokens").sum()
        return float(hits), simulation.news.snapshots - 6

    (exact, none), (lossy, repairs) = hit_rate(0.0), hit_rate(0.2)
    assert none == 0
    assert repairs > 10
    assert lossy > 0.8 * exact
