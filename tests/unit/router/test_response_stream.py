from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.cache_key import CacheUse
from kvferry.clock import ManualClock
from kvferry.generation import AttemptFinish, AttemptOutput, AttemptUsage, FinishReason, OutputToken
from kvferry.ids import Attempt, ExtraKey, Incarnation, RequestId, WorkerId
from kvferry.membership import Role, WorkerInfo
from kvferry.sampling import SamplingParams
from router.attempts import RoutedOutput
from router.policy import Route
from router.request import ResponseChunk, ValidRequest
from router.response_stream import ResponseStream
from router.tokenizer import Tokenizer
from tests.support.router_model import EOS_ID, byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer(), None)
P = WorkerInfo(WorkerId("p"), Role.PREFILL, Incarnation(1), "p:1")
D = WorkerInfo(WorkerId("d"), Role.DECODE, Incarnation(2), "d:1")
USAGE = AttemptUsage(prefill_hit_tokens=3, moved_tokens=5, moved_bytes=99, handoff_ms=1.5)


def make(clock: ManualClock | None = None, **sampling: Any) -> ResponseStream:
    prompt = np.zeros(7, dtype=np.int32)
    valid = ValidRequest(RequestId("r"), prompt, SamplingParams(**sampling), CacheUse(ExtraKey("")))
    return ResponseStream(
        valid,
        TOKENIZER.detokenizer,
        eos_token_ids=(EOS_ID,),
        clock=clock or ManualClock(),
        arrived_at=0.0,
    )


def tokens(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).tolist()
    return ids


def output(
    ids: list[int], reason: FinishReason | None = None, attempt: int = 1, sample: int = 0
) -> RoutedOutput:
    finish = None if reason is None else AttemptFinish(reason, USAGE)
    route = Route(decode=D, prefill=P, prefill_tokens=4, cost_ms=0.0)
    return RoutedOutput(
        AttemptOutput(tuple(map(OutputToken, ids)), finish, sample=sample), route, Attempt(attempt)
    )


def ids_of(chunk: ResponseChunk) -> list[int]:
    return [token.token_id for token in chunk.tokens]


def test_text_and_ids_pass_through() -> None:
    chunk = make().take(output(tokens("hey")))
    assert (chunk.text, ids_of(chunk), chunk.finish) == ("hey", tokens("hey"), None)


def test_figures_of_a_whole_answer() -> None:
    clock = ManualClock()
    stream = make(clock)
    clock.advance(0.25)
    stream.take(output(tokens("a")))
    clock.advance(0.1)
    stream.take(output(tokens("b")))
    clock.advance(0.2)
    stream.take(output(tokens("c"), attempt=2))
    clock.advance(5)
    finish = stream.take(output([], FinishReason.LENGTH, attempt=2)).finish
    assert finish is not None
    usage = finish.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.attempt) == (7, 3, 2)
    assert (usage.prefill_worker, usage.decode_worker, usage.kv) == ("p", "d", USAGE)
    assert usage.ttft_ms == pytest.approx(250)
    assert usage.itl_ms == pytest.approx(150)


def test_a_stop_string_ends_the_answer_within_an_output() -> None:
    chunk = make(stop=("END",)).take(output(tokens("yes END no")))
    assert chunk.text == "yes "
    assert ids_of(chunk) == tokens("yes END")
    assert chunk.finish is not None
    assert (chunk.finish.reason, chunk.finish.stop_string) == (FinishReason.STOP, "END")
    assert chunk.finish.usage.completion_tokens == 7


def test_text_held_for_a_stop_string_is_shown_at_the_end() -> None:
    stream = make(stop=("END",))
    assert stream.take(output(tokens("EN"))).text == ""
    assert stream.take(output([], FinishReason.LENGTH)).text == "EN"


def test_a_half_character_at_the_end_is_shown_as_one_replacement() -> None:
    stream = make()
    assert stream.take(output(tokens("é")[:1])).text == ""
    assert stream.take(output([], FinishReason.LENGTH)).text == "\ufffd"


def test_a_stop_string_wins_over_the_workers_end_in_the_same_output() -> None:
    chunk = make(stop=("b",)).take(output(tokens("ab"), FinishReason.LENGTH))
    assert chunk.finish is not None
    assert (chunk.text, chunk.finish.reason) == ("a", FinishReason.STOP)
    assert chunk.finish.usage.kv == USAGE


def test_figures_known_early_survive_an_end_that_the_router_decides() -> None:
    stream = make(stop=("b",))
    routed = output(tokens("a"))
    early = routed.output._replace(usage=USAGE)
    stream.take(routed._replace(output=early))
    stream.take(output(tokens("x")))
    finish = stream.take(output(tokens("b"))).finish
    assert finish is not None
    assert finish.usage.kv == USAGE


def test_the_stop_token_has_an_id_and_no_text() -> None:
    stream = make(stop_token_ids=tuple(tokens("!")))
    chunk = stream.take(output(tokens("hi!")))
    assert (chunk.text, ids_of(chunk)) == ("hi", tokens("hi!"))


def test_the_first_min_tokens_are_not_searched() -> None:
    stream = make(stop=("a",), min_tokens=2)
    chunk = stream.take(output(tokens("aaba")))
    assert (chunk.text, ids_of(chunk)) == ("aab", tokens("aaba"))


def test_a_cancelled_answer_shows_what_was_held() -> None:
    stream = make(stop=("END",))
    stream.take(output(tokens("xE")))
    (chunk,) = stream.cancelled()
    assert chunk.text == "E"
    assert chunk.finish is not None
    assert chunk.finish.reason is FinishReason.CANCELLED
    assert chunk.finish.usage.completion_tokens == 2


def test_cancelled_before_any_worker_had_it() -> None:
    (chunk,) = make().cancelled()
    finish = chunk.finish
    assert finish is not None
    assert (finish.usage.decode_worker, finish.usage.ttft_ms) == (None, 0.0)


def test_samples_do_not_see_each_others_text() -> None:
    stream = make(n=2, stop=("END",))
    half = tokens("é")
    assert stream.take(output(half[:1])).text == ""
    assert stream.take(output(tokens("EN"), sample=1)).text == ""
    chunk = stream.take(output(half[1:]))
    assert (chunk.text, chunk.index) == ("é", 0)
    chunk = stream.take(output(tokens("D"), sample=1))
    assert chunk.finish is not None
    assert (chunk.text, chunk.index, chunk.finish.stop_string) == ("", 1, "END")
    assert not stream.is_done


def test_what_comes_after_a_samples_end_is_neither_shown_nor_counted() -> None:
    stream = make(n=2, stop=("b",))
    stream.take(output(tokens("ab")))
    late = stream.take(output(tokens("more"), FinishReason.LENGTH))
    assert (late.text, late.tokens, late.finish) == ("", (), None)
    finish = stream.take(output(tokens("xy"), FinishReason.LENGTH, sample=1)).finish
    assert finish is not None
    assert finish.usage.completion_tokens == 4
    assert stream.is_done


def test_usage_is_told_once_with_the_figures_of_all_samples() -> None:
    clock = ManualClock()
    stream = make(clock, n=2)
    clock.advance(0.5)
    stream.take(output(tokens("a"), sample=1))
    clock.advance(0.1)
    stream.take(output(tokens("b")))
    stream.take(output(tokens("c"), sample=1))
    clock.advance(0.3)
    first = stream.take(output(tokens("d"), FinishReason.LENGTH)).finish
    assert first is not None
    assert first.usage is None
    last = stream.take(output([], FinishReason.STOP, sample=1)).finish
    assert last is not None
    assert last.usage is not None
    assert last.usage.ttft_ms == pytest.approx(500)
    # 300 ms in sample 0 and 100 ms in sample 1, one gap each.
    assert last.usage.itl_ms == pytest.approx(200)
    assert last.usage.kv == USAGE


def test_cancelling_ends_the_samples_that_have_not_ended() -> None:
    stream = make(n=3, stop=("END",))
    stream.take(output(tokens("x"), FinishReason.LENGTH, sample=1))
    stream.take(output(tokens("EN"), sample=2))
    first, second = stream.cancelled()
    assert (first.index, second.index, second.text) == (0, 2, "EN")
    assert first.finish is not None
    assert second.finish is not None
    assert (first.finish.usage, second.finish.usage.completion_tokens) == (None, 3)
    assert stream.is_done
    assert stream.cancelled() == []
