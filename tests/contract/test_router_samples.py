"""Several samples of one prompt at the front door: one attempt, an end for each, one usage."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from kvferry.generation import AttemptUsage
from kvferry.limits import SAMPLES_MAX
from kvferry.rpc.v1 import inference_pb2
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import RouterBench, eventually, router_bench, text_of
from tests.support.router_model import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path


def run(
    directory: Path, test: Callable[[RouterBench], Awaitable[None]], *workers: FakeWorker
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), router_bench(directory, *workers) as bench:
            await test(bench)

    asyncio.run(main())


def saying(*texts: str, **script: Any) -> Script:
    """A script with one sample for each text."""
    encoded = (tuple(byte_tokenizer().encode(text).ids) for text in texts)
    return Script(samples=tuple(encoded), **script)


def of_sample(responses: Sequence[Any], index: int) -> list[Any]:
    return [response for response in responses if response.index == index]


def test_each_sample_has_its_text_and_its_end_and_all_have_one_usage(directory: Path) -> None:
    usage = AttemptUsage(moved_tokens=5)
    worker = FakeWorker("w", script=lambda _: saying("one", "three", "€", usage=usage))

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("hello", sampling={"n": 3, "seed": 4})
        assert [text_of(of_sample(responses, index)) for index in range(3)] == ["one", "three", "€"]
        ends = [response for response in responses if response.HasField("finish")]
        assert [end.index for end in ends] == [0, 2, 1]
        assert [end.finish.HasField("usage") for end in ends] == [False, False, True]
        figures = ends[-1].finish.usage
        assert (figures.prompt_tokens, figures.completion_tokens) == (5, 3 + 5 + 3)
        assert (figures.moved_tokens, figures.attempt) == (5, 1)
        assert figures.ttft_ms > 0
        assert figures.itl_ms > 0
        (attempt,) = worker.requests
        assert (attempt.sampling.n, attempt.sampling.seed) == (3, 4)

    run(directory, test, worker)


def test_a_stop_string_ends_its_sample_and_the_others_go_on(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: saying("a END b c d e f", "g h i j END k"))

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("x", sampling={"n": 2, "stop": ["END"]})
        assert text_of(of_sample(responses, 0)) == "a "
        assert text_of(of_sample(responses, 1)) == "g h i j "
        ends = [response.finish for response in responses if response.HasField("finish")]
        assert [end.stop_string for end in ends] == ["END", "END"]
        # One whose sibling goes on is told to the worker; the last one ends the call.
        assert worker.ended_samples == [(worker.requests[0].id, 0)]
        # What the worker says after the end is neither shown nor counted.
        assert ends[-1].usage.completion_tokens == len("a END") + len("g h i j END")
        assert of_sample(responses, 0)[-1].HasField("finish")

    run(directory, test, worker)


def test_the_worker_is_let_go_when_every_sample_has_met_its_stop_string(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: saying("aE--------", "aaE-------", hang_after=8))

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("x", sampling={"n": 2, "stop": ["E"]})
        assert [text_of(of_sample(responses, index)) for index in range(2)] == ["a", "aa"]
        # Whichever was the first to meet its stop string: tokens of one sample come together.
        ((attempt_id, sample),) = worker.ended_samples
        assert attempt_id == worker.requests[0].id
        assert sample in (0, 1)
        await eventually(lambda: worker.cancelled == [worker.requests[0].id])

    run(directory, test, worker)


def test_cancel_by_id_ends_those_that_have_not_ended(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: saying("aE", "aaa", "bbb", hang_after=6))

    async def test(bench: RouterBench) -> None:
        request = inference_pb2.GenerateRequest(
            text="x", request_id="r", sampling={"n": 3, "stop": ["E"]}
        )
        call = bench.inference.Generate(request)
        responses = []
        while sum(len(response.token_ids) for response in responses) < 6:
            responses.append(await call.read())
        answer = await bench.inference.Cancel(inference_pb2.CancelRequest(request_id="r"))
        assert answer.found
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
        ends = [(r.index, r.finish.reason) for r in responses if r.HasField("finish")]
        cancelled = inference_pb2.FINISH_REASON_CANCELLED
        assert ends == [(0, inference_pb2.FINISH_REASON_STOP), (1, cancelled), (2, cancelled)]
        assert responses[-1].finish.usage.completion_tokens == 6
        await eventually(lambda: worker.cancelled == [worker.requests[0].id])

    run(directory, test, worker)


def test_a_failure_before_the_first_token_restarts_all_samples(directory: Path) -> None:
    worker = FakeWorker("w")
    worker.script = lambda request: (
        saying("aa", "bb", fail_after=0) if request.id.attempt == 1 else saying("aa", "bb")
    )

    async def test(bench: RouterBench) -> None:
        responses = await bench.ask("x", sampling={"n": 2})
        assert [text_of(of_sample(responses, index)) for index in range(2)] == ["aa", "bb"]
        assert responses[-1].finish.usage.attempt == 2
        assert responses[-1].finish.usage.completion_tokens == 4

    run(directory, test, worker)


def test_a_worker_that_forgets_a_sample_is_tried_again_or_named(directory: Path) -> None:
    """The end of one sample is not the end of the attempt."""
    worker = FakeWorker("w", script=lambda _: saying("aa"))

    async def test(bench: RouterBench) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.ask("x", sampling={"n": 2})
        assert "ended without a finish" in (caught.value.details() or "")

    run(directory, test, worker)


@pytest.mark.parametrize("n", [-1, 0, SAMPLES_MAX + 1])
def test_a_number_of_samples_that_cannot_be_is_refused_by_name(directory: Path, n: int) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.ask("x", sampling={"n": n})
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith("sampling.n")
        assert not worker.requests

    run(directory, test, worker)
