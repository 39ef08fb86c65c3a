"""Attempts at the decode side: each gets exactly one end, whatever happens to its handoff."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from decode_worker.intake import OFFER_PATIENCE_S, CancelAttempt, EndSample
from kvferry.cache_key import CacheUse
from kvferry.errors import (
    AdapterNotLoaded,
    DuplicateRequest,
    HandoffFailed,
    InternalError,
    InvalidInput,
    Overloaded,
    RequestCancelled,
)
from kvferry.generation import (
    AttemptUsage,
    FinishReason,
    OutputToken,
    PrefillSource,
)
from kvferry.ids import AdapterId, Attempt, AttemptId, ExtraKey, RequestId
from tests.support.digest_model import answer
from tests.support.intake_bench import KEY, PROMPT, SOURCE, IntakeBench

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.request import Request
    from kv_transfer.protocol.key import HandoffKey

SALT = ExtraKey("")


@pytest.fixture
def bench() -> Iterator[IntakeBench]:
    made = IntakeBench()
    yield made
    made.loop.close()


def test_without_a_source_the_prompt_is_computed_here(bench: IntakeBench) -> None:
    stream = bench.start(source=None)
    bench.engine_bench.run()
    ids, end = bench.read(stream)
    assert ids == answer(PROMPT, 4)
    assert end.finish.reason is FinishReason.LENGTH
    assert bench.driver.fetched == bench.returns.told == []
    bench.engine_bench.assert_idle()


def test_with_a_source_the_kv_is_fetched_and_decoded(bench: IntakeBench) -> None:
    stream = bench.start(source=SOURCE)
    assert bench.driver.fetched == [KEY]
    bench.receive_kv()
    bench.intake.first_tokens(KEY, (OutputToken(answer(PROMPT, 1)[0]),))
    usage = AttemptUsage(moved_tokens=6, moved_bytes=96)
    bench.intake.adopted(KEY, usage)
    bench.engine_bench.run()
    ids, end = bench.read(stream)
    assert ids == answer(PROMPT, 4)
    assert end.finish.usage == usage
    assert bench.returns.told == [("r", SOURCE)]
    bench.engine_bench.assert_idle()


@pytest.mark.parametrize("reserved", [False, True])
def test_failed_handoff_ends_the_attempt_and_gives_the_kv_back(
    bench: IntakeBench, reserved: bool
) -> None:
    stream = bench.start(source=SOURCE)
    if reserved:
        assert bench.intake.reserve(KEY, len(PROMPT)) is not None
    bench.intake.failed(KEY, HandoffFailed("the source is gone"))
    ids, end = bench.read(stream)
    assert ids == []
    assert isinstance(end, HandoffFailed)
    bench.engine_bench.assert_idle()


def test_reserving_again_gives_the_same_kv(bench: IntakeBench) -> None:
    bench.start(source=SOURCE)
    assert bench.intake.reserve(KEY, 6) is bench.intake.reserve(KEY, 6)


@pytest.mark.parametrize("stage", ["requested", "reserved", "decoding", "local"])
def test_cancel_in_any_stage_ends_everything_once(bench: IntakeBench, stage: str) -> None:
    stream = bench.start(source=None if stage == "local" else SOURCE)
    if stage == "reserved":
        bench.intake.reserve(KEY, len(PROMPT))
    if stage == "decoding":
        bench.receive_kv()
        bench.intake.first_tokens(KEY, (OutputToken(30),))
        bench.intake.adopted(KEY, AttemptUsage())
        bench.engine_bench.engine.step()
    bench.cancel(stream)
    bench.cancel(stream)
    assert bench.driver.aborted == ([KEY] if stage in {"requested", "reserved"} else [])
    _, end = bench.read(stream)
    assert isinstance(end, RequestCancelled)
    assert bench.returns.told == []
    bench.engine_bench.run()
    bench.engine_bench.assert_idle()


def test_second_attempt_with_the_same_id_is_refused_and_harmless(bench: IntakeBench) -> None:
    first = bench.start(source=None)
    second = bench.start(source=None)
    bench.cancel(second)
    bench.engine_bench.run()
    assert isinstance(bench.read(second)[1], DuplicateRequest)
    assert bench.read(first)[0] == answer(PROMPT, 4)


@pytest.mark.parametrize("source", [None, SOURCE])
def test_input_that_would_break_a_step_is_refused(
    bench: IntakeBench, source: PrefillSource | None
) -> None:
    for stream in (
        bench.start(source=source, prompt=[]),
        bench.start(source=source, prompt=[100_000]),
        bench.start(source=source, temperature=-1.0),
        bench.start(source=source, max_tokens=100_000),
    ):
        assert isinstance(bench.read(stream)[1], InvalidInput)
    use = CacheUse(ExtraKey(""), adapter=AdapterId("5a1e"))
    refused = bench.read(bench.start(source=source, cache_use=use))[1]
    assert isinstance(refused, AdapterNotLoaded)
    assert bench.driver.fetched == []
    bench.engine_bench.assert_idle()


def test_stop_tells_every_stream(bench: IntakeBench) -> None:
    stream = bench.start(source=None)
    bench.intake.stop(InternalError("engine failed"))
    assert isinstance(bench.read(stream)[1], InternalError)


def test_sizes_that_cannot_be_are_refused_before_anything_is_made_of_them(
    bench: IntakeBench,
) -> None:
    for max_tokens in (-1, -10, 0, 2**31 - 1):
        stream = bench.start(source=None, max_tokens=max_tokens)
        assert isinstance(bench.read(stream)[1], InvalidInput)
    bench.engine_bench.assert_idle()


@pytest.mark.parametrize("token", [-1, 211, 4_000_000_000])
def test_first_token_that_the_model_does_not_have_is_refused(
    bench: IntakeBench, token: int
) -> None:
    stream = bench.start(source=SOURCE)
    bench.receive_kv()
    with pytest.raises(InvalidInput, match="first_token"):
        bench.intake.first_tokens(KEY, (OutputToken(token),))
    bench.intake.failed(KEY, HandoffFailed("the source chose no token"))
    ids, end = bench.read(stream)
    assert ids == []
    assert isinstance(end, HandoffFailed)
    bench.engine_bench.assert_idle()


def test_attempts_with_a_source_count_against_the_queue(bench: IntakeBench) -> None:
    limit = bench.engine_bench.engine.attempts_max
    streams = [bench.start(source=SOURCE, name=f"r{number}") for number in range(limit + 1)]
    assert isinstance(bench.read(streams[-1])[1], Overloaded)
    # Only as many handoffs begin as there are rows; the others wait and hold nothing.
    assert len(bench.driver.fetched) == 8
    assert bench.engine_bench.engine.scheduler.waiting == limit - 8
    assert bench.engine_bench.engine.scheduler.uncomputed_tokens == (limit - 8) * len(PROMPT)
    bench.engine_bench.assert_idle()


def _full(bench: IntakeBench) -> Request:
    """Fill the KV with a prompt that stays until it is ended."""
    held = bench.engine_bench.submit("held", list(range(10, 210)), prefill_only=True)
    bench.engine_bench.run()
    return held


def test_attempt_waits_without_a_handoff_until_its_kv_fits(bench: IntakeBench) -> None:
    held = _full(bench)
    streams = [
        bench.start(source=SOURCE, name=name, prompt=[20] * 60, max_tokens=30) for name in "rs"
    ]
    assert bench.driver.fetched == []
    bench.engine_bench.engine.end(held)
    bench.intake.tick()
    assert [key.request_id for key in bench.driver.fetched] == ["r", "s"]
    for stream in streams:
        bench.intake.handle(CancelAttempt(AttemptId(RequestId("r"), Attempt(1)), stream))
    assert bench.driver.aborted == [KEY]


def test_cancel_while_waiting_for_room(bench: IntakeBench) -> None:
    held = _full(bench)
    stream = bench.start(source=SOURCE, prompt=[20] * 60)
    bench.cancel(stream)
    assert isinstance(bench.read(stream)[1], RequestCancelled)
    bench.engine_bench.engine.end(held)
    bench.intake.tick()
    assert bench.driver.fetched == bench.driver.aborted == []
    bench.engine_bench.assert_idle()


def test_offer_refused_for_too_long_is_declined_and_the_prompt_computed_here(
    bench: IntakeBench,
) -> None:
    stream = bench.start(source=SOURCE)
    # Somebody else took the room meanwhile.
    held = bench.engine_bench.request("held", list(range(10, 210)), prefill_only=True)
    rows = [bench.engine_bench.kv_cache.open(f"row {n}", held.prompt, SALT) for n in range(8)]
    assert bench.intake.reserve(KEY, len(PROMPT)) is None
    clock = bench.engine_bench.engine.clock
    clock.advance(OFFER_PATIENCE_S - 1)
    bench.intake.tick()
    assert bench.driver.aborted == []
    clock.advance(1)
    bench.intake.tick()
    assert bench.driver.aborted == [KEY]
    for kv in rows:
        bench.engine_bench.kv_cache.release(kv, None)
    bench.engine_bench.run()
    ids, end = bench.read(stream)
    assert ids == answer(PROMPT, 4)
    assert end.finish.reason is FinishReason.LENGTH
    assert bench.returns.told == []
    bench.engine_bench.assert_idle()


def test_fetch_that_is_refused_ends_the_attempt(bench: IntakeBench) -> None:
    def refuse(key: HandoffKey, *rest: object, goes_first: bool) -> None:
        raise DuplicateRequest(str(key))

    bench.driver.fetch = refuse
    stream = bench.start(source=SOURCE)
    assert isinstance(bench.read(stream)[1], DuplicateRequest)
    bench.intake.tick()
    bench.engine_bench.assert_idle()


# --- several samples ----------------------------------------------------------------------------


def _firsts(n: int) -> tuple[OutputToken, ...]:
    return n * (OutputToken(answer(PROMPT, 1)[0]),)


def test_samples_of_a_prompt_computed_here_end_one_by_one(bench: IntakeBench) -> None:
    options = {"temperature": 3.0, "seed": 1, "max_tokens": 12, "stop_token_ids": tuple(range(60))}
    stream = bench.start(source=None, n=5, **options)
    bench.engine_bench.run()
    ids, ends = bench.read_samples(stream, 5)
    assert sorted(ends) == list(range(5))
    assert ends != sorted(ends), "all ended at once"
    assert len({tuple(tokens) for tokens in ids}) == 5
    bench.engine_bench.assert_idle()


def test_samples_of_fetched_kv_are_streamed_before_it_is_there(bench: IntakeBench) -> None:
    stream = bench.start(source=SOURCE, n=3)
    assert bench.driver.fetched == [KEY]
    bench.receive_kv()
    bench.intake.first_tokens(KEY, _firsts(3))
    assert bench.engine_bench.kv_cache.accounts().rows_live == 1
    bench.intake.adopted(KEY, AttemptUsage(moved_tokens=6))
    assert bench.engine_bench.kv_cache.accounts().rows_live == 3
    bench.engine_bench.run()
    ids, ends = bench.read_samples(stream, 3)
    assert ids == 3 * [answer(PROMPT, 4)]
    assert ends == [0, 1, 2]
    bench.engine_bench.assert_idle()


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_source_that_chose_for_other_samples_is_refused(bench: IntakeBench, count: int) -> None:
    bench.start(source=SOURCE, n=3)
    bench.receive_kv()
    with pytest.raises(InvalidInput, match="first_tokens"):
        bench.intake.first_tokens(KEY, _firsts(count))
    bench.intake.failed(KEY, HandoffFailed("the source chose for others"))
    bench.engine_bench.assert_idle()


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("source", [None, SOURCE])
def test_cancel_ends_all_samples(
    bench: IntakeBench, source: PrefillSource | None, steps: int
) -> None:
    stream = bench.start(source=source, n=4, max_tokens=30)
    if source is not None:
        bench.receive_kv()
        bench.intake.first_tokens(KEY, _firsts(4))
        bench.intake.adopted(KEY, AttemptUsage())
    for _ in range(steps):
        bench.engine_bench.engine.step()
    bench.cancel(stream)
    assert isinstance(bench.read(stream)[1], RequestCancelled)
    assert not bench.engine_bench.engine.step()
    bench.engine_bench.assert_idle()


def test_cancel_after_some_samples_have_ended(bench: IntakeBench) -> None:
    options = {"temperature": 3.0, "seed": 1, "max_tokens": 30, "stop_token_ids": tuple(range(60))}
    stream = bench.start(source=None, n=5, **options)
    while len(bench.engine_bench.kv_cache.live_requests()) in (0, 1, 5):
        assert bench.engine_bench.engine.step()
    assert bench.engine_bench.kv_cache.live_requests()
    bench.cancel(stream)
    assert isinstance(bench.read(stream)[1], RequestCancelled)
    bench.engine_bench.assert_idle()


def _end_sample(bench: IntakeBench, sample: int) -> None:
    assert bench.intake.handle(EndSample(AttemptId(RequestId("r"), Attempt(1)), sample))


def test_a_sample_whose_text_has_ended_gives_its_kv_back(bench: IntakeBench) -> None:
    stream = bench.start(source=None, n=3, max_tokens=30)
    for _ in range(3):
        bench.engine_bench.engine.step()
    for sample in (0, 2, 2, 7):
        _end_sample(bench, sample)
    assert bench.engine_bench.kv_cache.accounts().rows_live == 1
    bench.engine_bench.run()
    ids, ends = bench.read_samples(stream, 3)
    assert ends == [0, 2, 1]
    assert ids == [answer(PROMPT, length) for length in (3, 30, 3)]
    _end_sample(bench, 1)
    bench.engine_bench.assert_idle()


def test_a_sample_may_end_while_its_kv_is_still_under_way(bench: IntakeBench) -> None:
    stream = bench.start(source=SOURCE, n=3)
    bench.receive_kv()
    bench.intake.first_tokens(KEY, _firsts(3))
    _end_sample(bench, 1)
    bench.intake.adopted(KEY, AttemptUsage())
    assert bench.engine_bench.kv_cache.accounts().rows_live == 2
    bench.engine_bench.run()
    ids, ends = bench.read_samples(stream, 3)
    assert [len(tokens) for tokens in ids] == [4, 1, 4]
    assert ends == [1, 0, 2]
    bench.engine_bench.assert_idle()
