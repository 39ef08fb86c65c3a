"""Attempts that go on where another one broke off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvferry.cache_key import CacheUse, Sharing
from kvferry.config import SchedulerConfig
from kvferry.errors import HandoffFailed, InvalidInput, RequestCancelled
from kvferry.generation import (
    AttemptOutput,
    AttemptUsage,
    FinishReason,
    OutputToken,
    SampleProgress,
)
from kvferry.ids import ExtraKey
from tests.support.digest_model import answer
from tests.support.intake_bench import KEY, PROMPT, SOURCE, IntakeBench

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.generation import PrefillSource

DRAWN = {"temperature": 3.0, "seed": 1, "max_tokens": 9, "stop_token_ids": tuple(range(30))}
SAMPLES = 5
SOURCE_CHOICE = (OutputToken(199),)
"""What a source says of a token that is known already."""


@pytest.fixture
def bench() -> Iterator[IntakeBench]:
    made = IntakeBench(num_slots=512, rows=16)
    yield made
    made.loop.close()


@pytest.fixture(scope="module")
def whole() -> list[list[int]]:
    """What an undisturbed attempt says of each sample."""
    made = IntakeBench(num_slots=512, rows=16)
    stream = made.start(source=None, n=SAMPLES, **DRAWN)
    made.engine_bench.run()
    said, _ = made.read_samples(stream, SAMPLES)
    made.loop.close()
    assert len({len(tokens) for tokens in said}) > 2, "all are of one length"
    return said


def _resumed(whole: list[list[int]], cut: int) -> list[SampleProgress]:
    """As if every sample had come to `cut` tokens, and the ends of the shorter ones were told."""
    return [SampleProgress(tuple(said[:cut]), len(said) < cut) for said in whole]


def _rest(whole: list[list[int]], resumed: Sequence[SampleProgress]) -> list[list[int]]:
    return [
        [] if progress.is_done else said[len(progress.token_ids) :]
        for said, progress in zip(whole, resumed, strict=True)
    ]


def _hand_over(bench: IntakeBench) -> None:
    """The source has computed what it was asked for."""
    bench.receive_kv()
    bench.intake.first_tokens(KEY, SOURCE_CHOICE)
    bench.intake.adopted(KEY, AttemptUsage(moved_tokens=7))


@pytest.mark.parametrize("source", [None, SOURCE])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_single_answer_goes_on(
    bench: IntakeBench, source: PrefillSource | None, cut: int
) -> None:
    said = answer(PROMPT, 4)
    stream = bench.start(source=source, resumed=[SampleProgress(tuple(said[:cut]))])
    if source is not None:
        ((asked, sampling),) = bench.driver.asked
        assert asked == PROMPT + said[: cut - 1]
        assert (sampling.n, sampling.max_tokens) == (1, 1)
        _hand_over(bench)
    bench.engine_bench.run()
    ids, end = bench.read(stream)
    assert ids == said[cut:]
    assert isinstance(end, AttemptOutput)
    assert end.finish is not None
    assert end.finish.reason is FinishReason.LENGTH
    assert end.finish.usage.moved_tokens == (7 if source else 0)
    assert len(bench.returns.told) == (1 if source else 0)
    bench.engine_bench.assert_idle()


@pytest.mark.parametrize("sharing", list(Sharing))
@pytest.mark.parametrize("source", [None, SOURCE])
@pytest.mark.parametrize("cut", range(1, 9))
def test_samples_go_on_each_where_it_was(
    bench: IntakeBench,
    whole: list[list[int]],
    source: PrefillSource | None,
    cut: int,
    sharing: Sharing,
) -> None:
    resumed = _resumed(whole, cut)
    use = CacheUse(ExtraKey(""), sharing)
    stream = bench.start(source=source, n=SAMPLES, resumed=resumed, cache_use=use, **DRAWN)
    if bench.driver.fetched:
        _hand_over(bench)
    bench.engine_bench.run()
    ids, ends = bench.read_samples(stream, SAMPLES)
    assert ids == _rest(whole, resumed)
    assert sorted(ends) == [i for i, progress in enumerate(resumed) if not progress.is_done]
    assert bench.returns.told == []
    bench.engine_bench.assert_idle()


def test_a_cut_between_the_first_tokens_of_samples(
    bench: IntakeBench, whole: list[list[int]]
) -> None:
    """The first one of those that go on has no token yet: its source chooses one."""
    told = [SampleProgress()] + [SampleProgress(tuple(said[:1])) for said in whole[1:]]
    stream = bench.start(source=SOURCE, n=SAMPLES, resumed=told, **DRAWN)
    ((asked, sampling),) = bench.driver.asked
    assert (asked, sampling.n, sampling.max_tokens) == (PROMPT, 1, 9)
    bench.receive_kv()
    bench.intake.first_tokens(KEY, (OutputToken(whole[0][0]),))
    bench.intake.adopted(KEY, AttemptUsage())
    bench.engine_bench.run()
    ids, _ = bench.read_samples(stream, SAMPLES)
    assert ids == [whole[0]] + [said[1:] for said in whole[1:]]
    bench.engine_bench.assert_idle()


@pytest.mark.parametrize("source", [None, SOURCE])
def test_an_answer_of_which_only_the_end_was_missing(
    bench: IntakeBench, source: PrefillSource | None
) -> None:
    said = answer(PROMPT, 4)
    for told, options, reason in (
        (said, {}, FinishReason.LENGTH),
        (said[:2], {"stop_token_ids": (said[1],)}, FinishReason.STOP),
        (said[:1], {"stop_token_ids": (said[0],)}, FinishReason.STOP),
        (said[:1], {"max_tokens": 1}, FinishReason.LENGTH),
    ):
        stream = bench.start(source=source, resumed=[SampleProgress(tuple(told))], **options)
        if source is not None:
            bench.receive_kv()
            # Its choice is of interest where it is the last token itself.
            bench.intake.first_tokens(KEY, (OutputToken(told[0]),))
            bench.intake.adopted(KEY, AttemptUsage())
        bench.engine_bench.run()
        ids, end = bench.read(stream)
        assert ids == []
        assert isinstance(end, AttemptOutput)
        assert end.finish is not None
        assert end.finish.reason is reason
        bench.engine_bench.assert_idle()


def test_what_the_samples_have_in_common_is_computed_once(bench: IntakeBench) -> None:
    prompt = list(range(20, 68))
    said = answer(prompt, 10)
    resumed = 3 * [SampleProgress(tuple(said[:4]))]
    stream = bench.start(source=SOURCE, prompt=prompt, n=3, max_tokens=10, resumed=resumed)
    _hand_over(bench)
    bench.engine_bench.run()
    assert bench.read_samples(stream, 3)[0] == 3 * [said[4:]]
    # The first one has all but its last token sent; the others find whole pages of that.
    tail = len(prompt) + 4 - (len(prompt) + 3) // 4 * 4
    computed = sum(map(sum, bench.engine_bench.runner.steps))
    assert computed == 1 + 2 * tail + 3 * 5
    bench.engine_bench.assert_idle()


@pytest.mark.parametrize("moment", ["requested", "reserved", "adopted", "decoding", "local"])
def test_cancel_at_any_moment(bench: IntakeBench, whole: list[list[int]], moment: str) -> None:
    source = None if moment == "local" else SOURCE
    stream = bench.start(source=source, n=SAMPLES, resumed=_resumed(whole, 2), **DRAWN)
    if moment == "reserved":
        bench.receive_kv()
    if moment in {"adopted", "decoding"}:
        _hand_over(bench)
    if moment == "decoding":
        bench.engine_bench.engine.step()
        bench.engine_bench.engine.step()
    bench.cancel(stream)
    assert bench.driver.aborted == ([KEY] if moment in {"requested", "reserved"} else [])
    assert isinstance(bench.read(stream)[1], RequestCancelled)
    assert not bench.engine_bench.engine.step()
    bench.engine_bench.assert_idle()


@pytest.mark.parametrize("moment", ["requested", "reserved", "adopted", "decoding"])
@pytest.mark.parametrize("sample", range(4))
def test_a_sample_ends_by_itself_at_any_moment(
    bench: IntakeBench, moment: str, sample: int
) -> None:
    said = answer(PROMPT, 12)
    resumed = [SampleProgress(tuple(said[:cut])) for cut in (2, 1, 4)]
    resumed.append(SampleProgress(tuple(said[:3]), True))
    stream = bench.start(source=SOURCE, n=4, max_tokens=12, resumed=resumed)
    if moment == "requested":
        bench.end_sample(sample)
    bench.receive_kv()
    if moment == "reserved":
        bench.end_sample(sample)
    bench.intake.first_tokens(KEY, SOURCE_CHOICE)
    bench.intake.adopted(KEY, AttemptUsage())
    if moment == "decoding":
        bench.engine_bench.engine.step()
        bench.engine_bench.engine.step()
    if moment in {"adopted", "decoding"}:
        bench.end_sample(sample)
    bench.engine_bench.run()
    ids, ends = bench.read_samples(stream, 4)
    assert sorted(ends) == [0, 1, 2]
    for index, cut in enumerate((2, 1, 4)):
        if index == sample:
            assert ids[index] == said[cut : cut + len(ids[index])]
            assert len(ids[index]) <= 2
        else:
            assert ids[index] == said[cut:]
    bench.engine_bench.assert_idle()


def test_a_handoff_that_fails_ends_all_of_it(bench: IntakeBench, whole: list[list[int]]) -> None:
    stream = bench.start(source=SOURCE, n=SAMPLES, resumed=_resumed(whole, 2), **DRAWN)
    bench.receive_kv()
    bench.intake.failed(KEY, HandoffFailed("the source is gone"))
    assert isinstance(bench.read(stream)[1], HandoffFailed)
    assert not bench.engine_bench.engine.step()
    bench.engine_bench.assert_idle()


def test_without_room_for_it_all_samples_are_computed_here(whole: list[list[int]]) -> None:
    bench = IntakeBench()
    resumed = _resumed(whole, 2)
    held = bench.engine_bench.submit("held", list(range(10, 110)), prefill_only=True)
    bench.engine_bench.run()
    stream = bench.start(source=SOURCE, n=SAMPLES, resumed=resumed, **DRAWN)
    assert bench.driver.fetched == [KEY]
    rows = [
        bench.engine_bench.kv_cache.open(f"row {n}", held.prompt, ExtraKey("")) for n in range(7)
    ]
    assert bench.intake.reserve(KEY, len(PROMPT) + 1) is None
    bench.engine_bench.engine.clock.advance(60.0)
    bench.intake.tick()
    assert bench.driver.aborted == [KEY]
    for kv in rows:
        bench.engine_bench.kv_cache.release(kv, None)
    bench.engine_bench.run()
    assert bench.read_samples(stream, SAMPLES)[0] == _rest(whole, resumed)
    bench.engine_bench.engine.end(held)
    bench.engine_bench.assert_idle()
    bench.loop.close()


def test_samples_follow_one_after_the_other_where_there_is_no_room(
    whole: list[list[int]],
) -> None:
    limits: list[dict[str, Any]] = [
        {"rows": 2},
        {"scheduler": SchedulerConfig(running_max=2)},
        {"num_slots": 32},
    ]
    for limit in limits:
        bench = IntakeBench(**limit)
        resumed = _resumed(whole, 3)
        stream = bench.start(source=SOURCE, n=SAMPLES, resumed=resumed, **DRAWN)
        _hand_over(bench)
        bench.engine_bench.run()
        assert bench.read_samples(stream, SAMPLES)[0] == _rest(whole, resumed)
        bench.engine_bench.assert_idle()
        bench.loop.close()


@pytest.mark.parametrize("source", [None, SOURCE])
def test_progress_that_cannot_be_is_refused(
    bench: IntakeBench, source: PrefillSource | None
) -> None:
    for resumed in (
        [SampleProgress((1,)), SampleProgress((1,))],
        [SampleProgress((1, 2, 3, 4, 5))],
        [SampleProgress((211,))],
    ):
        stream = bench.start(source=source, resumed=resumed)
        end = bench.read(stream)[1]
        assert isinstance(end, InvalidInput)
        assert end.field.startswith("resumed")
    assert bench.driver.fetched == []
    bench.engine_bench.assert_idle()
