"""An answer outlives the worker that gives it: the router has another one go on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from kvferry.errors import DeadlineExceeded, InternalError, InvalidInput, Overloaded
from kvferry.generation import AttemptUsage, SampleProgress
from kvferry.ids import new_incarnation
from kvferry.limits import ATTEMPT_FAILURES_MAX, ATTEMPTS_MAX
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import RouterBench, eventually, router_bench, text_of
from tests.support.router_model import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptRequest

Request = inference_pb2.GenerateRequest
TEXT = "an answer of € 40"


def run(
    directory: Path,
    test: Callable[[RouterBench], Awaitable[None]],
    *workers: FakeWorker,
    **settings: Any,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), router_bench(directory, *workers, **settings) as bench:
            await test(bench)

    asyncio.run(main())


def ids(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer().encode(text).ids)


def saying(*texts: str, **script: Any) -> Script:
    return Script(samples=tuple(ids(text) for text in texts), **script)


def of_sample(responses: Sequence[Any], index: int) -> list[Any]:
    return [response for response in responses if response.index == index]


def failing_first(*texts: str, after: int, **script: Any) -> Callable[[AttemptRequest], Script]:
    """Breaks off in its first attempt."""
    return lambda request: saying(
        *texts, fail_after=after if request.id.attempt == 1 else None, **script
    )


def both(script: Callable[[AttemptRequest], Script]) -> list[FakeWorker]:
    return [FakeWorker("w1", script=script), FakeWorker("w2", script=script)]


def attempts_of(workers: Sequence[FakeWorker]) -> list[AttemptRequest]:
    """In their order."""
    requests = [request for worker in workers for request in worker.requests]
    return sorted(requests, key=lambda request: request.id.attempt)


async def read_tokens(call: Any, count: int) -> list[Any]:
    """Responses with the first `count` tokens; several may come in one."""
    responses: list[Any] = []
    while sum(len(response.token_ids) for response in responses) < count:
        responses.append(await call.read())
    return responses


async def read_rest(call: Any) -> list[Any]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def broken_off(bench: RouterBench, **fields: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.ask("hello", **fields)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details() or ""


@pytest.mark.parametrize("after", range(1, len(ids(TEXT)) + 1))
def test_an_answer_that_breaks_off_anywhere_is_whole(directory: Path, after: int) -> None:
    """Also within a character, and between the last token and the end."""
    usage = AttemptUsage(moved_tokens=5)
    workers = both(failing_first(TEXT, after=after, usage=usage))

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("hello")
        assert text_of(responses) == TEXT
        assert [i for response in responses for i in response.token_ids] == list(ids(TEXT))
        figures = responses[-1].finish.usage
        assert (figures.prompt_tokens, figures.completion_tokens) == (5, len(ids(TEXT)))
        assert (figures.attempt, figures.moved_tokens) == (2, 5)
        first, second = attempts_of(workers)
        assert first.id.request_id == second.id.request_id
        assert (first.resumed, second.resumed) == ((), (SampleProgress(ids(TEXT)[:after]),))
        assert (first.sampling, first.prompt.tolist()) == (second.sampling, second.prompt.tolist())
        assert [len(worker.requests) for worker in workers] == [1, 1], "the failed one was asked"

    run(directory, test, *workers)


def test_a_stop_string_across_the_seam_ends_the_answer(directory: Path) -> None:
    text = "say it. STOP and more"
    for after in range(len("say it. "), len("say it. STOP")):
        workers = both(failing_first(text, after=after))

        async def test(bench: RouterBench) -> None:
            responses = await bench.ask("hello", sampling={"stop": ["STOP"]})
            assert text_of(responses) == "say it. "
            assert responses[-1].finish.stop_string == "STOP"
            assert responses[-1].finish.usage.completion_tokens == len("say it. STOP")

        run(directory, test, *workers)


def test_samples_go_on_where_each_of_them_was(directory: Path) -> None:
    texts = ("ab", "stopE--------", "a longer text", "another")
    workers = both(failing_first(*texts, after=26))

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("x", sampling={"n": 4, "stop": ["E"]})
        said = [text_of(of_sample(responses, index)) for index in range(4)]
        assert said == ["ab", "stop", "a longer text", "another"]
        ends = [response for response in responses if response.HasField("finish")]
        assert sorted(end.index for end in ends) == [0, 1, 2, 3]
        whole = sum(map(len, ("ab", "stopE", "a longer text", "another")))
        assert ends[-1].finish.usage.completion_tokens == whole
        resumed = attempts_of(workers)[1].resumed
        # "ab" was told whole, but its end was not; "E" was met, of which the worker knew nothing.
        assert [progress.is_done for progress in resumed] == [False, True, False, False]
        assert [p.token_ids for p in resumed][0::2] == [ids("ab"), ids("a longer")]

    run(directory, test, *workers)


def test_samples_that_have_ended_are_not_asked_for_again(directory: Path) -> None:
    def script(request: AttemptRequest) -> Script:
        after = 6 if request.id.attempt == 1 else None
        return saying("ab", "cdefgh", fail_after=after, tells_ends=True)

    workers = both(script)

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("x", sampling={"n": 2})
        assert [text_of(of_sample(responses, index)) for index in range(2)] == ["ab", "cdefgh"]
        ends = [response for response in responses if response.HasField("finish")]
        assert [end.index for end in ends] == [0, 1]
        assert attempts_of(workers)[1].resumed == (
            SampleProgress(ids("ab"), True),
            SampleProgress(ids("cdef")),
        )
        assert attempts_of(workers)[1].samples_left == 1

    run(directory, test, *workers)


def test_logprobs_come_with_each_token_once(directory: Path) -> None:
    workers = both(failing_first("abcdef", after=3, logprob=-0.5))

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("x", sampling={"logprobs": 1})
        entries = [entry for response in responses for entry in response.logprobs]
        assert [entry.chosen.token_id for entry in entries] == list(ids("abcdef"))
        assert {entry.chosen.logprob for entry in entries} == {-0.5}

    run(directory, test, *workers)


def test_progress_renews_the_number_of_tries_up_to_a_bound(directory: Path) -> None:
    """Each attempt gives one token and fails."""
    text = "x" * (ATTEMPT_FAILURES_MAX + 5)

    def script(request: AttemptRequest) -> Script:
        told = len(request.resumed[0].token_ids) if request.resumed else 0
        return saying(text[: told + 1], fail_after=1) if told < give_up_at else saying(text)

    workers = both(script)

    async def test(bench: RouterBench) -> None:
        nonlocal give_up_at
        assert text_of(await bench.ask("x")) == text
        give_up_at = len(text)
        details = await broken_off(bench)
        assert f"after {ATTEMPT_FAILURES_MAX} tokens" in details

    give_up_at = ATTEMPT_FAILURES_MAX - 1
    run(directory, test, *workers)


def test_tries_without_progress_are_few(directory: Path) -> None:
    def script(request: AttemptRequest) -> Script:
        return saying("abcdef", fail_after=3 if request.id.attempt == 1 else 0)

    workers = both(script)

    async def test(bench: RouterBench) -> None:
        assert "after 3 tokens: worker" in await broken_off(bench)
        assert len(attempts_of(workers)) == 1 + ATTEMPTS_MAX

    run(directory, test, *workers)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (InternalError("a bug"), "INTERNAL"),
        (InvalidInput("resumed", "is odd"), "INVALID_ARGUMENT"),
        (DeadlineExceeded("too late"), "DEADLINE_EXCEEDED"),
    ],
)
def test_what_is_no_failure_of_a_worker_ends_the_answer(
    directory: Path, error: KvferryError, seen: str
) -> None:
    workers = both(lambda _: saying("abcdef", fail_after=3, fail_with=error))

    async def test(bench: RouterBench) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.ask("hello")
        assert caught.value.code().name == seen
        assert len(attempts_of(workers)) == 1

    run(directory, test, *workers)


def test_full_workers_are_outwaited(directory: Path) -> None:
    def script(request: AttemptRequest) -> Script:
        if request.id.attempt == 1:
            return saying(TEXT, fail_after=3)
        full = Script(fail_after=0, fail_with=Overloaded("the queue is full", 0.25))
        return full if request.id.attempt < 7 else saying(TEXT)

    workers = both(script)

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("hello")
        assert text_of(responses) == TEXT
        assert responses[-1].finish.usage.attempt == 7

    run(directory, test, *workers)


@pytest.mark.parametrize("told", [0, 4])
def test_an_answer_waits_for_a_worker_to_come_back(
    directory: Path, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It goes on with the news of the worker; the end of its patience does not come to its help.
    monkeypatch.setattr("router.attempts.RESUME_PATIENCE_S", 1e6)
    worker = FakeWorker("w", script=lambda _: saying(TEXT, hang_after=told))

    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(Request(text="ab"))
        responses = await read_tokens(call, told)
        await eventually(lambda: worker.requests != [])
        await worker.stop()
        await bench.members()
        await asyncio.sleep(0.3)
        worker.incarnation, worker.script = new_incarnation(), lambda _: saying(TEXT)
        await bench.members(await worker.start())
        responses += await read_rest(call)
        assert text_of(responses) == TEXT
        assert responses[-1].finish.usage.attempt == 2

    run(directory, test, worker)


def test_nobody_comes_back(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.attempts.RESUME_PATIENCE_S", 0.5)
    worker = FakeWorker("w", script=lambda _: saying(TEXT, hang_after=1))

    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(Request(text="ab"))
        await call.read()
        await bench.members()
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"after 1 tokens: .*left the cluster; now no"
        ):
            await call.read()
        await eventually(lambda: bench.router.requests_in_flight == 0)

    run(directory, test, worker)


@pytest.mark.parametrize("how", ["cancel", "deadline", "hang up", "shutdown"])
def test_a_client_can_end_an_answer_that_waits_for_a_worker(directory: Path, how: str) -> None:
    worker = FakeWorker("w", script=lambda _: saying(TEXT, hang_after=1))

    async def test(bench: RouterBench) -> None:
        timeout_s = 1.0 if how == "deadline" else None
        call = bench.inference.Generate(Request(text="ab", request_id="r"), timeout=timeout_s)
        await call.read()
        await bench.members()
        await asyncio.sleep(0.1)
        assert bench.router.requests_in_flight == 1
        match how:
            case "cancel":
                assert bench.router.cancel("r")
                last = await call.read()
                assert last.finish.reason == inference_pb2.FINISH_REASON_CANCELLED
                assert last.finish.usage.completion_tokens == 1
            case "deadline":
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            case "hang up":
                call.cancel()
            case "shutdown":
                await bench.router.stop()
                with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
                    await call.read()
        await eventually(lambda: bench.router.requests_in_flight == 0)

    run(directory, test, worker)


@pytest.mark.parametrize("how", ["leaves", "falls silent", "stops"])
def test_whatever_becomes_of_the_worker(directory: Path, how: str) -> None:
    first = FakeWorker("first", script=lambda _: saying(TEXT, hang_after=6))
    second = FakeWorker("second", script=lambda _: saying(TEXT))

    async def test(bench: RouterBench) -> None:
        call = bench.inference.Generate(Request(text="ab"))
        responses = await read_tokens(call, 6)
        info = await second.start()
        match how:
            case "leaves":
                await bench.members(info)
            case "falls silent":
                await bench.members(first.info, info)
                first.status_fails = True
            case "stops":
                await bench.members(first.info, info)
                await first.stop()
        responses += await read_rest(call)
        assert text_of(responses) == TEXT
        assert responses[-1].finish.usage.decode_worker == "second"
        if how == "falls silent":
            await eventually(lambda: first.cancelled != [])
        await second.stop()

    run(directory, test, first)


@pytest.mark.parametrize(("after", "again"), [(2, True), (1, False)])
def test_who_computed_the_prompt_is_asked_again_if_it_had_arrived(
    directory: Path, after: int, again: bool
) -> None:
    prefills = [FakeWorker(name, Role.PREFILL) for name in ("p1", "p2")]
    script = failing_first(TEXT, after=after)
    decodes = [FakeWorker(name, Role.DECODE, script=script) for name in ("d1", "d2")]

    async def test(bench: RouterBench) -> None:
        for _ in range(6):
            await bench.ask("hello")
        by_request: dict[str, list[str]] = {}
        for request in attempts_of(decodes):
            assert request.source is not None
            by_request.setdefault(request.id.request_id, []).append(request.source.worker_id)
        same = [first == second for first, second in by_request.values()]
        assert len(same) == 6
        assert not any(same) if not again else any(same)

    run(directory, test, *prefills, *decodes)


def test_each_failure_is_counted_once_at_the_workers(directory: Path) -> None:
    """What an attempt was counted as is taken back, also after a failure."""
    workers = both(failing_first(TEXT, after=4))

    async def test(bench: RouterBench) -> None:
        for _ in range(3):
            assert text_of(await bench.ask("hello")) == TEXT
        await eventually(lambda: bench.router.requests_in_flight == 0)
        view = bench.router.fleet.view([])
        assert view.decode.loads.sequences.tolist() == [0, 0]

    run(directory, test, *workers)
