"""Requests whose prefix lower tiers of the cache are sending back, beside those that compute."""

from __future__ import annotations

import numpy as np
import pytest

from engine.request import Request, Stage
from kvferry.config import HostTierConfig, SchedulerConfig
from tests.support.digest_model import VOCAB, answer
from tests.support.engine_bench import EngineBench

HOST = HostTierConfig(memory_bytes=2**16, load_back_tokens_min=8)


def _prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCAB, length).tolist()


FIRST = _prompt(1, 60)


def _bench() -> EngineBench:
    """The KV of FIRST is on the host; the device's slots have been another's since."""
    bench = EngineBench(page_size=4, num_slots=128, host=HOST)
    bench.submit("first", FIRST, max_tokens=4)
    bench.run()
    bench.submit("other", _prompt(2, 120), max_tokens=4)
    bench.run()
    return bench


def _loading(bench: EngineBench) -> Request:
    request = bench.submit("again", FIRST, max_tokens=4)
    bench.engine.step()
    assert request.stage is Stage.LOADING
    assert bench.engine.scheduler.running == 1
    return request


def test_prefix_from_the_host_is_not_computed_again() -> None:
    bench = _bench()
    request = _loading(bench)
    assert not bench.engine.step()
    assert "again" not in bench.recorder.hits, "told before the prefix was final"
    bench.copier.run()
    assert bench.engine.step()
    assert bench.recorder.hits["again"] == 56
    assert request.held_kv.host_hit_len > 0
    assert bench.runner.steps[-1] == [4]
    bench.run()
    assert bench.recorder.told["again"] == answer(FIRST, 4)
    bench.assert_idle()


def test_others_go_on_while_one_loads() -> None:
    bench = _bench()
    request = _loading(bench)
    bench.submit("beside", _prompt(3, 10), max_tokens=4)
    for _ in range(4):
        assert bench.engine.step()
    assert bench.recorder.told["beside"] == answer(_prompt(3, 10), 4)
    assert request.stage is Stage.LOADING
    bench.run()
    assert bench.recorder.told["again"] == answer(FIRST, 4)
    bench.assert_idle()


def test_load_that_fails_ends_in_recomputing() -> None:
    bench = _bench()
    request = _loading(bench)
    before = request.held_kv.prefix_len
    bench.copier.run(error=OSError("unreadable"))
    assert bench.engine.step()
    assert bench.recorder.hits["again"] == before
    bench.run()
    assert bench.recorder.told["again"] == answer(FIRST, 4)
    bench.assert_idle()


def test_ending_a_request_that_loads_gives_everything_back() -> None:
    bench = _bench()
    request = _loading(bench)
    bench.engine.end(request)
    assert bench.engine.scheduler.running == 0
    bench.run()
    assert "again" not in bench.recorder.hits
    bench.assert_idle()


@pytest.mark.parametrize("page_size", [1, 16])
def test_retracted_kv_comes_back_from_the_host(page_size: int) -> None:
    prompts = {f"r{n}": _prompt(n, 16 + n) for n in range(12)}
    bench = EngineBench(
        page_size=page_size,
        num_slots=160,
        rows=16,
        host=HostTierConfig(memory_bytes=2**18, load_back_tokens_min=1),
        scheduler=SchedulerConfig(output_reserve=0.0),
    )
    requests = [bench.submit(n, prompt, max_tokens=40) for n, prompt in prompts.items()]
    came_back: list[int] = []
    original = bench.kv_cache.load_back

    def load_back(kv, token_ids):
        coming = original(kv, token_ids)
        came_back.append(coming)
        return coming

    bench.kv_cache.load_back = load_back
    bench.run(5000)
    assert bench.recorder.told == {name: answer(p, 40) for name, p in prompts.items()}
    assert any(request.retractions for request in requests)
    assert any(came_back), "nothing was loaded"
    bench.assert_idle()
