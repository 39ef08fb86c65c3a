"""Several samples of one prompt: computed once, parted at its end, each as if it were alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from engine.holding import new_holding
from engine.request import Request, Stage
from kvferry.cache_key import CacheUse, Sharing
from kvferry.config import SchedulerConfig
from kvferry.generation import FinishReason, OutputToken
from kvferry.ids import Attempt, ExtraKey, RequestId
from kvferry.sampling import SamplingParams
from tests.support.digest_model import EOS, VOCAB, answer
from tests.support.engine_bench import EngineBench, name_of

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = list(range(20, 41))
DRAWN = {"temperature": 3.0, "seed": 7, "max_tokens": 9}
OPTIMIST = SchedulerConfig(output_reserve=0.0)
"""Promises the prompt and the first token alone."""


def _names(name: str, n: int) -> list[str]:
    return [name, *(f"{name}/{sample}" for sample in range(1, n))]


def _alone(prompt: list[int], n: int, **options: object) -> list[list[int]]:
    """The answers of single requests with the seeds of the samples."""
    bench = EngineBench(auditing=False)
    params = SamplingParams(n=n, **options)
    for sample in range(n):
        bench.submit(f"r{sample}", prompt, **options | {"seed": params.of_sample(sample).seed})
        bench.run()
    return [bench.recorder.told[f"r{sample}"] for sample in range(n)]


def _told(bench: EngineBench, name: str, n: int) -> list[list[int]]:
    return [bench.recorder.told[sample] for sample in _names(name, n)]


def _new_tokens(bench: EngineBench) -> int:
    return sum(sum(lengths) for lengths in bench.runner.steps)


def _receive(bench: EngineBench, request: Request) -> None:
    """Do what a handoff does between its reservation and its commit."""
    kv = request.held_kv
    start = kv.committed_len
    slots = bench.kv_cache.slots(kv, start, request.prompt_len)
    bench.runner.receive(slots, request.prompt[start:], start)
    bench.kv_cache.commit(kv, request.prompt_len)
    bench.kv_cache.adopt(kv)


# --- what samples are ---------------------------------------------------------------------------


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_greedy_samples_are_equal_and_their_prompt_is_computed_once(
    page_size: int, radix: bool
) -> None:
    bench = EngineBench(page_size=page_size, num_slots=512, radix=radix)
    bench.submit("r", PROMPT, n=4)
    bench.run()
    assert _told(bench, "r", 4) == 4 * [answer(PROMPT, 8)]
    assert set(bench.recorder.ends) == set(_names("r", 4))
    # The last token of an answer is never fed back.
    assert _new_tokens(bench) == len(PROMPT) + 4 * 7
    assert bench.engine.scheduler.counters["samples_forked"] == 3
    bench.assert_idle()


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_drawn_samples_are_those_of_single_requests_with_their_seeds(
    page_size: int, radix: bool
) -> None:
    bench = EngineBench(page_size=page_size, radix=radix)
    bench.submit("r", PROMPT, n=5, **DRAWN)
    bench.run()
    told = _told(bench, "r", 5)
    assert told == _alone(PROMPT, 5, **DRAWN)
    assert len({tuple(tokens) for tokens in told}) == 5
    bench.assert_idle()


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_kv_that_was_sent_parts_alike(page_size: int, radix: bool) -> None:
    bench = EngineBench(page_size=page_size, radix=radix)
    request = bench.reserve("r", PROMPT, n=5, **DRAWN)
    _receive(bench, request)
    alone = _alone(PROMPT, 5, **DRAWN)
    bench.engine.adopt(request, [OutputToken(tokens[0]) for tokens in alone])
    bench.run()
    # The source's tokens are not told again.
    assert _told(bench, "r", 5) == [tokens[1:] for tokens in alone]
    assert _new_tokens(bench) == 5 * 8
    bench.assert_idle()


def test_a_source_chooses_all_first_tokens_and_holds_one_kv() -> None:
    bench = EngineBench()
    request = bench.submit("r", PROMPT, n=5, prefill_only=True, **DRAWN)
    bench.run()
    assert _told(bench, "r", 5) == [tokens[:1] for tokens in _alone(PROMPT, 5, **DRAWN)]
    assert request.stage is Stage.HELD
    assert bench.kv_cache.accounts().rows_live == 1
    bench.engine.end(request)
    bench.assert_idle()


def test_full_pages_are_shared_and_the_rest_is_copied() -> None:
    bench = EngineBench(page_size=16, num_slots=512)
    request = bench.submit("r", PROMPT, n=4)
    bench.engine.step()
    slots = [set(bench.kv_cache.slots(one.held_kv, 0, 21).tolist()) for one in request.samples]
    common = set.intersection(*slots)
    assert len(common) == 16
    assert len(set.union(*slots)) == 16 + 4 * 5
    accounts = bench.kv_cache.accounts()
    assert (accounts.protected, accounts.private) == (16, 4 * 16)
    bench.run()
    bench.assert_idle()


# --- ends ---------------------------------------------------------------------------------------


def test_one_token_each() -> None:
    bench = EngineBench()
    bench.submit("r", PROMPT, n=3, max_tokens=1)
    bench.run()
    assert _told(bench, "r", 3) == 3 * [answer(PROMPT, 1)]
    assert bench.recorder.ends == dict.fromkeys(_names("r", 3), FinishReason.LENGTH)
    # Nothing was forked for what had ended.
    assert bench.engine.scheduler.counters["samples_forked"] == 0
    assert bench.engine.scheduler.counters["samples_queued"] == 0
    bench.assert_idle()


def test_samples_end_one_by_one() -> None:
    bench = EngineBench(num_slots=1024, rows=16)
    options = DRAWN | {"max_tokens": 40, "stop_token_ids": tuple(range(60))}
    bench.submit("r", PROMPT, n=8, **options)
    bench.run()
    told = _told(bench, "r", 8)
    assert told == _alone(PROMPT, 8, **options)
    assert len({len(tokens) for tokens in told}) > 3
    bench.assert_idle()


def test_a_first_token_may_end_some_samples_and_not_others() -> None:
    firsts = [tokens[0] for tokens in _alone(PROMPT, 6, **DRAWN)]
    bench = EngineBench()
    bench.submit("r", PROMPT, n=6, stop_token_ids=tuple(firsts[:3]), **DRAWN)
    bench.run()
    stopped = [name for name, reason in bench.recorder.ends.items() if reason is FinishReason.STOP]
    assert set(_names("r", 6)[:3]) <= set(stopped)
    assert len(bench.recorder.ends) == 6
    bench.assert_idle()


@pytest.mark.parametrize("steps", [1, 3])
def test_every_sample_can_be_ended_by_itself(steps: int) -> None:
    bench = EngineBench()
    request = bench.submit("r", PROMPT, n=4)
    for _ in range(steps):
        bench.engine.step()
    bench.engine.end(request)
    bench.engine.end(request.samples[2])
    bench.run()
    assert set(bench.recorder.ends) == {"r/1", "r/3"}
    assert bench.recorder.told["r/1"] == bench.recorder.told["r/3"] == answer(PROMPT, 8)
    bench.assert_idle()


@pytest.mark.parametrize("sharing", [Sharing.RECOMPUTED, Sharing.PRIVATE])
def test_samples_of_kv_that_is_shared_with_nobody(sharing: Sharing) -> None:
    bench = EngineBench(num_slots=512)
    request = bench.request("r", PROMPT, n=4)
    request.cache_use = CacheUse(ExtraKey(""), sharing)
    bench.engine.submit(request)
    bench.run()
    assert _told(bench, "r", 4) == 4 * [answer(PROMPT, 8)]
    assert bench.engine.scheduler.counters["samples_queued"] == 0
    bench.assert_idle()


def test_min_tokens_bans_ends_in_every_sample() -> None:
    bench = EngineBench(num_slots=1024)
    stops = tuple(range(0, VOCAB, 2))
    options = DRAWN | {"min_tokens": 3, "stop_token_ids": stops}
    bench.submit("r", PROMPT, n=6, **options)
    bench.run()
    assert min(len(tokens) for tokens in _told(bench, "r", 6)) > 3
    assert EOS not in stops
    bench.assert_idle()


# --- room ---------------------------------------------------------------------------------------


def test_a_prompt_waits_until_there_are_rows_and_places_for_all_samples() -> None:
    bench = EngineBench(rows=6, scheduler=SchedulerConfig(running_max=5))
    first = bench.submit("first", PROMPT, max_tokens=30)
    bench.engine.step()
    second = bench.submit("second", PROMPT, n=5, max_tokens=30)
    third = bench.submit("third", PROMPT, n=4, max_tokens=30)
    bench.engine.step()
    assert [r.stage for r in (first, second, third)] == [
        Stage.DECODING,
        Stage.WAITING,
        Stage.WAITING,
    ]
    bench.engine.end(first)
    bench.engine.step()
    assert [one.stage for one in second.samples] == 5 * [Stage.DECODING]
    bench.run()
    assert bench.engine.scheduler.counters["samples_queued"] == 0
    assert _told(bench, "third", 4) == 4 * [answer(PROMPT, 30)]
    bench.assert_idle()


def test_rows_are_kept_for_samples_to_come() -> None:
    bench = EngineBench(rows=4, scheduler=SchedulerConfig(chunk_tokens=18))
    group = bench.submit("group", PROMPT, n=3)
    bench.engine.step()
    assert group.stage is Stage.PREFILLING
    others = [bench.submit(name, PROMPT[:3]) for name in ("second", "third")]
    bench.engine.step()
    assert [one.stage for one in others] == [Stage.DECODING, Stage.WAITING]
    assert [one.stage for one in group.samples] == 3 * [Stage.DECODING]
    bench.run()
    assert bench.engine.scheduler.counters["samples_queued"] == 0
    bench.assert_idle()


def test_slots_are_kept_for_samples_to_come() -> None:
    bench = EngineBench(num_slots=100, scheduler=SchedulerConfig(chunk_tokens=18, output_reserve=1))
    group = bench.submit("group", PROMPT, n=3, max_tokens=20)
    bench.engine.step()
    # 20 shared tokens, and 20 of each sample; 28 of the other would fit beside one sample.
    other = bench.submit("other", PROMPT[:3], max_tokens=26)
    bench.engine.step()
    assert [one.stage for one in group.samples] == 3 * [Stage.DECODING]
    assert other.stage is Stage.WAITING
    bench.run()
    bench.assert_idle()


def test_what_samples_share_is_promised_once() -> None:
    bench = EngineBench(num_slots=100, scheduler=SchedulerConfig(output_reserve=1))
    bench.submit("other", PROMPT[:3], max_tokens=14)
    group = bench.submit("group", PROMPT, n=3, max_tokens=20)
    bench.engine.step()
    assert [one.stage for one in group.samples] == 3 * [Stage.DECODING]
    bench.run()
    assert bench.engine.scheduler.counters["samples_queued"] == 0
    bench.assert_idle()


def test_kv_that_is_held_for_nobody_gives_way_to_samples() -> None:
    bench = EngineBench(num_slots=100, scheduler=SchedulerConfig(chunk_tokens=4, output_reserve=0))
    engine, cached = bench.engine, list(range(60, 101))
    bench.submit("cached", cached, max_tokens=1)
    bench.run()
    runner = bench.submit("runner", PROMPT[:4], max_tokens=40)
    while runner.num_tokens < 27:
        engine.step()
    tokens = np.asarray(cached, dtype=np.int32)
    held = new_holding(
        RequestId("held"), Attempt(1), tokens, CacheUse(ExtraKey("")), lambda: engine.end(held)
    )
    assert engine.hold_cached(held)
    group = bench.submit("group", PROMPT, n=3)
    while not group.siblings:
        assert held.stage is Stage.HELD
        engine.step()
    assert held.stage is Stage.ENDED
    assert [one.stage for one in group.samples] == 3 * [Stage.DECODING]
    bench.run()
    bench.assert_idle()


@pytest.mark.parametrize("window", [6, 16])
def test_samples_under_a_sliding_window(window: int) -> None:
    single = EngineBench(window=window)
    single.submit("r", PROMPT, max_tokens=20)
    single.run()
    bench = EngineBench(window=window)
    bench.submit("r", PROMPT, n=3, max_tokens=20)
    bench.run()
    assert _told(bench, "r", 3) == 3 * [single.recorder.told["r"]]
    bench.assert_idle()


@pytest.mark.parametrize(
    "limits",
    [
        {"rows": 2},
        {"scheduler": SchedulerConfig(running_max=2)},
        {"num_slots": 64, "page_size": 16},
    ],
    ids=["rows", "places", "slots"],
)
def test_a_worker_without_room_for_all_samples_serves_them_one_after_the_other(
    limits: dict[str, object],
) -> None:
    bench = EngineBench(**limits)
    bench.submit("r", PROMPT, n=6, max_tokens=20)
    bench.submit("late", PROMPT[:2])
    bench.run()
    assert _told(bench, "r", 6) == 6 * [answer(PROMPT, 20)]
    assert bench.engine.scheduler.counters["samples_queued"] > 0
    # Whoever came later was not let in before the samples that had to wait.
    assert list(bench.recorder.ends)[-1] == "late"
    bench.assert_idle()


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_nobody_can_tell_that_samples_were_retracted(page_size: int, radix: bool) -> None:
    prompts = {f"r{n}": list(range(20 + n, 29 + 5 * n)) for n in range(5)}
    slots = 160 if radix else 256
    # The state machine audits every step of such runs.
    bench = EngineBench(
        page_size=page_size,
        num_slots=slots,
        rows=32,
        radix=radix,
        scheduler=OPTIMIST,
        auditing=False,
    )
    requests = [
        bench.submit(name, prompt, n=4, **DRAWN | {"max_tokens": 30, "seed": seed})
        for seed, (name, prompt) in enumerate(prompts.items())
    ]
    bench.run(5000)
    for seed, (name, prompt) in enumerate(prompts.items()):
        expected = _alone(prompt, 4, **DRAWN | {"max_tokens": 30, "seed": seed})
        assert _told(bench, name, 4) == expected
    samples = [sample for request in requests for sample in request.samples]
    assert max(sample.retractions for sample in samples) == 1
    bench.assert_idle()


@pytest.mark.parametrize("page_size", [1, 4])
def test_retracted_samples_do_not_disturb_their_siblings(page_size: int) -> None:
    bench = EngineBench(page_size=page_size, num_slots=100, scheduler=OPTIMIST)
    request = bench.submit("r", PROMPT, n=4, **DRAWN | {"max_tokens": 30})
    bench.run()
    assert _told(bench, "r", 4) == _alone(PROMPT, 4, **DRAWN | {"max_tokens": 30})
    retractions = [sample.retractions for sample in request.samples]
    assert retractions[0] == 0
    assert sum(retractions) > 0, "there was no pressure"
    assert max(retractions) == 1
    bench.assert_idle()


def test_a_prompt_that_is_retracted_comes_back_with_all_its_samples_assured() -> None:
    scheduler = SchedulerConfig(output_reserve=0.0, chunk_tokens=6)
    bench = EngineBench(num_slots=120, rows=16, scheduler=scheduler)
    for seed in range(4):
        bench.submit(f"r{seed}", PROMPT[seed : seed + 4], max_tokens=25)
    for _ in range(8):
        bench.engine.step()
    group = bench.submit("group", list(range(30, 70)), n=3, max_tokens=12)
    while not group.retractions:
        assert bench.engine.step()
        assert not group.siblings, "it was to be retracted before its prompt was computed"
    while group.stage is Stage.WAITING:
        bench.engine.step()
    assert bench.engine.scheduler.horizon == group.last_arrival == group.arrival + 2
    bench.run(2000)
    assert max(sample.retractions for sample in group.samples) == 1
    assert _told(bench, "group", 3) == 3 * [answer(list(range(30, 70)), 12)]
    bench.assert_idle()


@pytest.mark.parametrize("what", ["waiting", "prefilling", "decoding", "queued"])
def test_all_samples_can_be_ended_at_any_time(what: str) -> None:
    rows = 2 if what == "queued" else 8
    bench = EngineBench(rows=rows, scheduler=SchedulerConfig(chunk_tokens=8))
    request = bench.submit("r", PROMPT, n=5)
    wanted: dict[str, Callable[[], bool]] = {
        "waiting": lambda: True,
        "prefilling": lambda: request.stage is Stage.PREFILLING,
        "decoding": lambda: len(bench.recorder.told.get("r/4", [])) > 2,
        "queued": lambda: any(one.stage is Stage.WAITING for one in request.siblings),
    }
    while not wanted[what]():
        assert bench.engine.step()
    for sample in request.samples:
        if sample.stage is not Stage.ENDED:
            bench.engine.end(sample)
    assert not bench.engine.step()
    assert bench.recorder.ends == {}
    bench.assert_idle()


def test_names_of_samples() -> None:
    request = EngineBench().request("r", PROMPT, n=2)
    request.fork([1, 2])
    assert [name_of(one) for one in request.samples] == ["r", "r/1"]
    assert [one.known[-1] for one in request.samples] == [1, 2]
    assert not np.shares_memory(request.tokens, request.siblings[0].tokens)


# --- order --------------------------------------------------------------------------------------


def _turn(bench: EngineBench) -> None:
    """A turn of a worker whose handoffs end at once."""
    while (request := bench.engine.next_expected()) is not None:
        assert bench.engine.reserve_inbound(request)
        _receive(bench, request)
        bench.engine.adopt(request, request.sampling.n * [OutputToken(answer(PROMPT, 1)[0])])
    bench.engine.step()


@pytest.mark.parametrize("is_sent", [True, False], ids=["kv is sent", "computed here"])
def test_many_samples_are_not_overtaken_for_ever(is_sent: bool) -> None:
    """They need all places at once; whoever comes later must not take each as it comes free."""
    bench = EngineBench(rows=8, scheduler=SchedulerConfig(running_max=4))
    engine = bench.engine
    for number in range(3):
        bench.submit(f"first{number}", PROMPT[: 3 + number], max_tokens=5 + 3 * number)
    engine.step()
    group = bench.request("group", PROMPT, n=4)
    (engine.submit_inbound if is_sent else engine.submit)(group)
    for number in range(30):
        later = bench.request(f"later{number}", PROMPT, max_tokens=6)
        (engine.submit if is_sent else engine.submit_inbound)(later)
        _turn(bench)
    assert len(group.samples) == 4
    assert all(one.stage is not Stage.WAITING for one in group.samples)
    for _ in range(200):
        _turn(bench)
    bench.assert_idle()
