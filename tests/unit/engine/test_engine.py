"""The engine step over a model that notices any wrong slot."""

from __future__ import annotations

import numpy as np
import pytest

from engine.request import Request, Stage
from kvferry.config import SchedulerConfig
from kvferry.errors import InvalidInput, Overloaded
from kvferry.generation import FinishReason, OutputToken
from kvferry.sampling import SamplingParams
from tests.support.digest_model import EOS, VOCAB, answer
from tests.support.engine_bench import EngineBench, Recorder

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16, 64])


def _prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCAB, length).tolist()


@PAGE_SIZES
@pytest.mark.parametrize("radix", [True, False])
def test_answers_equal_an_undisturbed_run(page_size: int, radix: bool) -> None:
    bench = EngineBench(
        page_size=page_size,
        num_slots=1024,
        radix=radix,
        scheduler=SchedulerConfig(chunk_tokens=11),
    )
    shared = _prompt(0, 20)
    prompts = {f"r{n}": shared + _prompt(n, n * 7 % 30 + 1) for n in range(12)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt)
    bench.run()
    assert bench.recorder.told == {name: answer(p, 8) for name, p in prompts.items()}
    assert set(bench.recorder.ends.values()) == {FinishReason.LENGTH}
    bench.assert_idle()


@PAGE_SIZES
def test_second_turn_hits_the_first(page_size: int) -> None:
    bench = EngineBench(page_size=page_size, num_slots=512)
    first = _prompt(1, 70)
    bench.submit("first", first)
    bench.run()
    turn = first + bench.recorder.told["first"] + _prompt(2, 9)
    bench.submit("second", turn)
    bench.run()
    # The last token of an answer is never fed back, so its KV was not there to be kept.
    known = len(first) + 8 - 1
    assert bench.recorder.hits["second"] == known // page_size * page_size
    assert bench.recorder.told["second"] == answer(turn, 8)
    bench.assert_idle()


def test_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    bench = EngineBench(scheduler=SchedulerConfig(chunk_tokens=16))
    bench.submit("long", _prompt(3, 50))
    bench.run()
    assert bench.recorder.computed_lens["long"] == [16, 32, 48, 50]
    assert bench.runner.steps[:4] == [[16], [16], [16], [2]]


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    bench = EngineBench(scheduler=SchedulerConfig(chunk_tokens=9))
    bench.submit("short", _prompt(4, 3))
    bench.engine.step()
    bench.submit("long", _prompt(5, 40))
    bench.run()
    # Every step while the long prompt is computed also decodes one token of the short one.
    assert [sorted(step) for step in bench.runner.steps[1:5]] == [[1, 8]] * 4
    assert bench.recorder.told["long"] == answer(_prompt(5, 40), 8)


def test_stops_at_end_of_text_and_at_stop_ids() -> None:
    prompt = next(p for p in (_prompt(seed, 6) for seed in range(500)) if EOS in answer(p, 8)[:-1])
    expected = answer(prompt, 8, ignore_eos=False)
    bench = EngineBench()
    bench.submit("eos", prompt, ignore_eos=False)
    bench.submit("stop-id", prompt, stop_token_ids=(EOS,))
    bench.submit("ignored", prompt)
    bench.submit("minimum", prompt, ignore_eos=False, min_tokens=8)
    bench.run()
    assert bench.recorder.told["eos"] == bench.recorder.told["stop-id"] == expected
    assert bench.recorder.told["ignored"] == answer(prompt, 8)
    assert EOS not in bench.recorder.told["minimum"]
    assert len(bench.recorder.told["minimum"]) == 8
    assert bench.recorder.ends == {
        "eos": FinishReason.STOP,
        "stop-id": FinishReason.STOP,
        "ignored": FinishReason.LENGTH,
        "minimum": FinishReason.LENGTH,
    }


@PAGE_SIZES
def test_never_runs_out_of_slots_while_decoding(page_size: int) -> None:
    bench = EngineBench(page_size=page_size, num_slots=192, rows=32)
    prompts = {f"r{n}": _prompt(n, 10 + n) for n in range(20)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, max_tokens=30)
    bench.run(5000)
    assert bench.recorder.told == {name: answer(p, 30) for name, p in prompts.items()}
    bench.assert_idle()


def test_waits_for_a_row() -> None:
    bench = EngineBench(rows=1)
    bench.submit("a", _prompt(1, 5))
    bench.submit("b", _prompt(2, 5))
    bench.engine.step()
    assert bench.engine.scheduler.waiting == 1
    bench.run()
    assert bench.recorder.told["b"] == answer(_prompt(2, 5), 8)


def test_request_that_can_never_fit_is_refused() -> None:
    bench = EngineBench(num_slots=64)
    with pytest.raises(InvalidInput, match="max_tokens"):
        bench.submit("huge", _prompt(1, 60), max_tokens=30)
    bench.submit("fits", _prompt(1, 60), max_tokens=5)
    bench.run()
    assert bench.recorder.told["fits"] == answer(_prompt(1, 60), 5)


def test_full_queue_refuses() -> None:
    bench = EngineBench(scheduler=SchedulerConfig(queue_max=2))
    for name in "ab":
        bench.submit(name, _prompt(1, 5))
    with pytest.raises(Overloaded):
        bench.submit("c", _prompt(1, 5))


@pytest.mark.parametrize(
    "prompt", [[], [VOCAB], [-1]], ids=["empty", "beyond the vocabulary", "negative"]
)
def test_input_that_would_break_a_step_is_refused(prompt: list[int]) -> None:
    bench = EngineBench()
    with pytest.raises(InvalidInput, match="prompt"):
        bench.engine.check_input(np.asarray(prompt, dtype=np.int32), SamplingParams())


@pytest.mark.parametrize("stage", [Stage.WAITING, Stage.PREFILLING, Stage.DECODING, Stage.HELD])
def test_ending_a_request_in_any_stage_gives_everything_back(stage: Stage) -> None:
    bench = EngineBench(scheduler=SchedulerConfig(chunk_tokens=8))
    request = bench.submit("r", _prompt(1, 20), prefill_only=stage is Stage.HELD)
    while request.stage is not stage:
        assert bench.engine.step()
    bench.engine.end(request)
    bench.assert_idle()
    assert "r" not in bench.recorder.ends
    assert not bench.engine.step()


def test_held_prompt_stays_until_it_is_ended() -> None:
    bench = EngineBench()
    request = bench.submit("r", _prompt(1, 20), prefill_only=True)
    bench.run()
    assert request.stage is Stage.HELD
    assert bench.recorder.told["r"] == answer(_prompt(1, 20), 1)
    assert bench.kv_cache.accounts().protected == 20
    bench.engine.end(request)
    bench.assert_idle()
    assert bench.kv_cache.accounts().evictable == 20


@PAGE_SIZES
def test_adopted_kv_is_decoded_like_our_own(page_size: int) -> None:
    source = EngineBench(page_size=page_size)
    sink = EngineBench(page_size=page_size)
    prompt = _prompt(9, 37)
    held = source.submit("r", prompt, prefill_only=True)
    source.run()
    request = sink.reserve("r", prompt)
    assert sink.kv_cache.accounts().inbound > 0
    here = sink.kv_cache.slots(request.kv, 0, len(prompt))
    there = source.kv_cache.slots(held.kv, 0, len(prompt))
    sink.kv_cache.pool.buffer[:, :, here] = source.kv_cache.pool.buffer[:, :, there]
    sink.kv_cache.commit(request.kv, len(prompt))
    sink.kv_cache.adopt(request.kv)
    first = source.recorder.told["r"][0]
    sink.engine.adopt(request, (OutputToken(first),))
    sink.run()
    assert [first, *sink.recorder.told["r"]] == answer(prompt, 8)
    sink.assert_idle()


def test_inbound_kv_is_not_published_when_it_is_given_up() -> None:
    bench = EngineBench()
    request = bench.reserve("r", _prompt(1, 20))
    bench.engine.end(request)
    bench.assert_idle()
    assert bench.kv_cache.accounts().evictable == 0


def test_adopted_answer_of_one_token_ends_at_once() -> None:
    bench = EngineBench()
    request = bench.reserve("r", _prompt(1, 20), max_tokens=1)
    bench.kv_cache.commit(request.kv, 20)
    bench.kv_cache.adopt(request.kv)
    bench.engine.adopt(request, (OutputToken(11),))
    assert bench.recorder.ends == {"r": FinishReason.LENGTH}
    bench.assert_idle()
    assert bench.kv_cache.accounts().evictable == 20


@PAGE_SIZES
def test_sink_may_hit_the_whole_prompt(page_size: int) -> None:
    bench = EngineBench(page_size=page_size)
    prompt = _prompt(3, 64)
    bench.submit("first", prompt)
    bench.run()
    again = bench.reserve("again", prompt)
    assert again.kv.committed_len == 64
    bench.kv_cache.adopt(again.kv)
    bench.engine.adopt(again, (OutputToken(answer(prompt, 1)[0]),))
    bench.run()
    assert [answer(prompt, 1)[0], *bench.recorder.told["again"]] == answer(prompt, 8)
    bench.assert_idle()


def test_context_is_counted_in_tokens_and_slots_in_pages() -> None:
    bench = EngineBench(page_size=16, num_slots=1008, context_length=1000)
    bench.submit("whole context", _prompt(1, 500), max_tokens=501)
    with pytest.raises(InvalidInput, match="max_tokens"):
        bench.submit("one more", _prompt(1, 500), max_tokens=502)


class EndsAnother(Recorder):
    """Ends another request when a chunk of its own has been computed."""

    def __init__(self, bench: EngineBench, other: Request) -> None:
        super().__init__()
        self._bench, self._other = bench, other

    def computed(self, request: Request) -> None:
        super().computed(request)
        if self._other.stage is not Stage.ENDED:
            self._bench.engine.end(self._other)


@pytest.mark.parametrize("ended_is_first", [True, False])
def test_a_listener_may_end_another_request_of_the_step(ended_is_first: bool) -> None:
    bench = EngineBench(scheduler=SchedulerConfig(chunk_tokens=100))
    # A step is in order of arrival, which is when a request is made.
    order = ["ended", "ends"] if ended_is_first else ["ends", "ended"]
    requests = {name: bench.request(name, _prompt(len(name), 9)) for name in order}
    listener = EndsAnother(bench, requests["ended"])
    requests["ends"].listener = listener
    for request in requests.values():
        bench.engine.submit(request)
    bench.run()
    assert listener.told == {"ends": answer(_prompt(len("ends"), 9), 8)}
    assert bench.recorder.told == {}
    bench.assert_idle()
