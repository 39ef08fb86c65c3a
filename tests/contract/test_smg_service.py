"""The engine protocol of the smg gateway over real gRPC, by its own stubs."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from kvferry.accounts import KvAccounts, WorkerLoad
from kvferry.errors import Overloaded
from kvferry.generation import AttemptUsage, FinishReason
from kvferry.sampling import Constraint, ConstraintKind
from router.api.smg_messages import request_from_smg
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import SERVED, RouterBench, eventually, router_bench
from tests.support.router_model import EOS_ID, VOCAB_SIZE, byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

Request = vllm_engine_pb2.GenerateRequest
Params = vllm_engine_pb2.SamplingParams


def run(
    directory: Path,
    test: Callable[[RouterBench, Any], Awaitable[None]],
    *workers: FakeWorker,
    **settings: Any,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), router_bench(directory, *workers, **settings) as bench:
            await test(bench, vllm_engine_pb2_grpc.VllmEngineStub(bench.channel))

    asyncio.run(main())


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text).ids
    return ids


def asking(text: str = "abc", *, stream: bool = False, **params: Any) -> Any:
    return Request(
        request_id="mine",
        tokenized={"original_text": text, "input_ids": ids_of(text)},
        sampling_params=Params(**params),
        stream=stream,
    )


async def answers(stub: Any, request: Any) -> list[Any]:
    return [message async for message in stub.Generate(request)]


async def refusal(stub: Any, request: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(stub, request)
    return caught.value.code(), caught.value.details() or ""


def test_an_answer_in_one_piece(directory: Path) -> None:
    usage = AttemptUsage(prefill_hit_tokens=2, host_hit_tokens=1, decode_hit_tokens=3)
    worker = FakeWorker("w", script=lambda _: Script(usage=usage))

    async def test(bench: RouterBench, stub: Any) -> None:
        (answer,) = await answers(stub, asking("abcd"))
        end = answer.complete
        assert (list(end.output_ids), end.finish_reason) == (ids_of("abcd"), "stop")
        assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (4, 4, 3)
        assert end.index == 0
        assert not end.HasField("output_logprobs")

    run(directory, test, worker)


def test_a_streamed_answer_has_each_token_once(directory: Path) -> None:
    async def test(bench: RouterBench, stub: Any) -> None:
        *pieces, last = await answers(stub, asking("abcd", stream=True))
        assert [id_ for each in pieces for id_ in each.chunk.token_ids] == ids_of("abcd")
        assert sum(each.chunk.completion_tokens for each in pieces) == 4
        end = last.complete
        assert (list(end.output_ids), end.completion_tokens, end.prompt_tokens) == ([], 4, 4)

    run(directory, test, FakeWorker("w"))


@pytest.mark.parametrize("stream", [False, True])
def test_samples_end_with_what_the_prompt_cost(directory: Path, stream: bool) -> None:
    samples = (tuple(ids_of("x")), tuple(ids_of("yz")))
    usage = AttemptUsage(prefill_hit_tokens=1)
    worker = FakeWorker("w", script=lambda _: Script(samples=samples, usage=usage))

    async def test(bench: RouterBench, stub: Any) -> None:
        messages = await answers(stub, asking(stream=stream, n=2))
        ends = {m.complete.index: m.complete for m in messages if m.HasField("complete")}
        assert {index: end.completion_tokens for index, end in ends.items()} == {0: 1, 1: 2}
        assert {(end.prompt_tokens, end.cached_tokens) for end in ends.values()} == {(3, 1)}
        streamed: dict[int, list[int]] = {0: [], 1: []}
        for message in messages:
            if message.HasField("chunk"):
                streamed[message.chunk.index] += message.chunk.token_ids
        told = streamed if stream else {i: list(end.output_ids) for i, end in ends.items()}
        assert told == dict(enumerate(map(list, samples)))

    run(directory, test, worker)


def test_what_the_gateway_asks_reaches_the_worker(directory: Path) -> None:
    worker = FakeWorker("w")
    given = {"top_k": 5, "min_tokens": 1, "seed": 7, "stop_token_ids": [9], "ignore_eos": True}

    async def test(bench: RouterBench, stub: Any) -> None:
        await answers(stub, asking(temperature=0.0, top_p=0.5, max_tokens=8, **given))
        sampling = worker.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 5)
        assert (sampling.min_tokens, sampling.max_tokens, sampling.seed) == (1, 8, 7)
        assert (sampling.stop_token_ids, sampling.ignore_eos) == ((9,), True)
        await answers(stub, asking(seed=-1, logit_bias={3: -1.5}))
        sampling = worker.requests[1].sampling
        # What is absent has its default, as far as the context reaches.
        assert (sampling.temperature, sampling.top_p, sampling.n) == (1.0, 1.0, 1)
        assert (sampling.repetition_penalty, sampling.max_tokens) == (1.0, 512 - 3)
        assert sampling.seed == 2**64 - 1
        assert dict(sampling.logit_bias) == {3: -1.5}

    run(directory, test, worker)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json_schema": "{}"}, ConstraintKind.JSON_SCHEMA, "{}"),
        ({"json_object": True}, ConstraintKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"regex": "a+"}, ConstraintKind.REGEX, "a+"),
        ({"grammar": 'root ::= "a"'}, ConstraintKind.GRAMMAR, 'root ::= "a"'),
        ({"choice": {"choices": ["a.b", "c"]}}, ConstraintKind.REGEX, r"a\.b|c"),
    ],
)
def test_constraints(given: dict[str, Any], kind: ConstraintKind, text: str) -> None:
    request = request_from_smg(
        asking(**given), seed=1, context_length=64, timeout_s=None, tenant="t"
    )
    assert request.sampling.constraint == Constraint(kind, text)
    assert request.tenant == "t"


def test_logprobs(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(logprob=-0.5))

    async def test(bench: RouterBench, stub: Any) -> None:
        (answer,) = await answers(stub, asking("ab", logprobs=0))
        told = answer.complete.output_logprobs
        assert list(told.token_ids) == ids_of("ab")
        assert list(told.token_logprobs) == [-0.5, -0.5]
        pieces = await answers(stub, asking("ab", logprobs=0, stream=True))
        streamed = [id_ for each in pieces for id_ in each.chunk.output_logprobs.token_ids]
        assert streamed == ids_of("ab")

    run(directory, test, worker)


def test_what_ended_an_answer(directory: Path) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench, stub: Any) -> None:
        (answer,) = await answers(stub, asking("abcd", stop=["bc"]))
        assert answer.complete.matched_stop_str == "bc"
        assert list(answer.complete.output_ids) == ids_of("abc")
        (answer,) = await answers(stub, asking("abc", stop_token_ids=ids_of("c")))
        assert answer.complete.matched_token_id == ids_of("c")[0]
        worker.script = lambda _: Script(reason=FinishReason.LENGTH)
        (answer,) = await answers(stub, asking("abc", stop_token_ids=ids_of("c")))
        assert answer.complete.finish_reason == "length"
        assert answer.complete.WhichOneof("matched_stop") is None

    run(directory, test, worker)


def test_abort_ends_a_request_and_says_so(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(hang_after=1))

    async def test(bench: RouterBench, stub: Any) -> None:
        call = stub.Generate(asking(stream=True))
        assert len((await call.read()).chunk.token_ids) == 1
        await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["other", "mine"]))
        end = await call.read()
        assert await call.read() is grpc.aio.EOF
        assert (end.complete.finish_reason, end.complete.completion_tokens) == ("abort", 1)
        await eventually(lambda: len(worker.cancelled) == 1)
        assert bench.router.requests_in_flight == 0

    run(directory, test, worker)


def test_a_gateway_that_goes_away_ends_its_request(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(hang_after=1))

    async def test(bench: RouterBench, stub: Any) -> None:
        call = stub.Generate(asking(stream=True))
        await call.read()
        call.cancel()
        await eventually(lambda: len(worker.cancelled) == 1)
        assert bench.router.requests_in_flight == 0

    run(directory, test, worker)


def test_the_gateways_deadline_counts(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(hang_after=1))

    async def test(bench: RouterBench, stub: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(asking(stream=True), timeout=0.3):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: len(worker.cancelled) == 1)

    run(directory, test, worker)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(), "input: is missing"),
        (Request(tokenized={"input_ids": []}), "tokenized.input_ids: must not be empty"),
        (Request(tokenized={"input_ids": [1, VOCAB_SIZE]}), "tokenized.input_ids[1]: "),
        (Request(tokenized={"input_ids": [2**32 - 1]}), "tokenized.input_ids: "),
        (Request(text=""), "text: must not be empty"),
        (asking(temperature=-1.0), "sampling_params.temperature: "),
        (asking(logprobs=-1), "sampling_params.logprobs: "),
        (asking(max_tokens=0), "sampling_params.max_tokens: "),
        (asking(prompt_logprobs=1), "sampling_params.prompt_logprobs: is not served"),
        (asking(truncate_prompt_tokens=1), "sampling_params.truncate_prompt_tokens: "),
        (asking(structural_tag="{}"), "sampling_params.structural_tag: is not served"),
        (asking(choice={"choices": []}), "sampling_params.choice.choices: "),
        (Request(text="a", mm_inputs={}), "mm_inputs: is not served"),
        (Request(text="a", kv_transfer_params_json="{}"), "kv_transfer_params_json: is not"),
        (Request(text="a", data_parallel_rank=1), "data_parallel_rank: is 1; must be 0"),
    ],
)
def test_a_refusal_names_the_field(directory: Path, request_: Any, field: str) -> None:
    async def test(bench: RouterBench, stub: Any) -> None:
        code, details = await refusal(stub, request_)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(field)

    run(directory, test, FakeWorker("w"))


def test_bytes_that_are_no_message_are_refused(directory: Path) -> None:
    async def test(bench: RouterBench, stub: Any) -> None:
        method = bench.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        for data, details in ((b"\xff", "request: "), (b"\x0a\x01\xff", "request_id: is not")):
            with pytest.raises(grpc.aio.AioRpcError, match=details) as caught:
                async for _ in method(data):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(directory, test, FakeWorker("w"))


def test_a_refusal_of_a_full_cluster_keeps_its_status(directory: Path) -> None:
    failure = Overloaded("the queue is full", 1.5)
    worker = FakeWorker("w", script=lambda _: Script(fail_after=0, fail_with=failure))

    async def test(bench: RouterBench, stub: Any) -> None:
        code, details = await refusal(stub, asking())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "retry after 1.5 s" in details

    run(directory, test, worker)


def test_what_is_served(directory: Path) -> None:
    async def test(bench: RouterBench, stub: Any) -> None:
        info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        assert (info.served_model_name, info.model_path, info.is_generation) == (
            SERVED,
            SERVED,
            True,
        )
        assert (info.vocab_size, info.max_context_length) == (VOCAB_SIZE, 512)
        assert list(info.eos_token_ids) == [EOS_ID]
        server = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        assert (server.data_parallel_size, server.block_size) == (1, 4)
        assert server.max_num_seqs == 32

    run(directory, test, FakeWorker("w"))


def test_health_follows_the_workers(directory: Path) -> None:
    async def test(bench: RouterBench, stub: Any) -> None:
        asked = vllm_engine_pb2.HealthCheckRequest()
        assert (await stub.HealthCheck(asked)).healthy
        await bench.members()
        assert not (await stub.HealthCheck(asked)).healthy

    run(directory, test, FakeWorker("w"))


def test_the_tokenizer_comes_whole(directory: Path) -> None:
    # Random text does not shrink, so that there are several pieces.
    (directory / "merges.txt").write_text(
        "".join(hashlib.sha256(bytes([i % 256, i // 256])).hexdigest() for i in range(4096))
    )
    (directory / "notes.txt").write_bytes(b"private")

    async def test(bench: RouterBench, stub: Any) -> None:
        call = stub.GetTokenizer(common_pb2.GetTokenizerRequest())
        chunks = [chunk async for chunk in call]
        assert len(chunks) > 2
        assert all(len(chunk.data) == 65536 and not chunk.sha256 for chunk in chunks[:-1])
        data = b"".join(chunk.data for chunk in chunks)
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        archive = zipfile.ZipFile(io.BytesIO(data))
        assert "notes.txt" not in archive.namelist()
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "merges.txt"):
            assert archive.read(name) == (directory / name).read_bytes()

    run(directory, test, FakeWorker("w"))


LOADED = {
    "load": WorkerLoad(running=3, waiting=2, waiting_tokens=50),
    "accounts": KvAccounts(600, 200, 200, 0, 0, 1000, 0, 0, 64),
}


def test_load_is_that_of_all_workers(directory: Path) -> None:
    async def test(bench: RouterBench, stub: Any) -> None:
        (load,) = (await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (6, 4, 10)
        assert (load.num_used_tokens, load.max_total_num_tokens) == (400, 2000)
        assert (load.token_usage, load.num_waiting_uncached_tokens) == (0.2, 100)

    run(directory, test, FakeWorker("v", **LOADED), FakeWorker("w", **LOADED))


def test_load_is_pushed_to_those_who_understand_it(directory: Path) -> None:
    async def test(bench: RouterBench, stub: Any) -> None:
        asked = common_pb2.SubscribeKvEventsRequest(load_records_before_first_batch=True)
        call = stub.SubscribeKvEvents(asked)
        first, second = [await call.read() for _ in range(2)]
        assert (first.sequence_number, list(first.events)) == (0, [])
        assert first.load.load_only
        assert (first.load.running_requests, first.load.waiting_uncached_tokens) == (3, 50)
        assert [first.load.sample, second.load.sample] == [1, 2]
        call.cancel()
        silent = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        async with asyncio.timeout(60):
            await silent.initial_metadata()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(silent.read(), 0.2)

    run(directory, test, FakeWorker("w", **LOADED))


def test_listeners_do_not_hold_up_the_end(directory: Path) -> None:
    async def test(bench: RouterBench, stub: Any) -> None:
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await call.initial_metadata()
        async with asyncio.timeout(60):
            await bench.front_door.stop(60)
        assert await call.read() is grpc.aio.EOF

    run(directory, test, FakeWorker("w"))


def test_a_client_can_learn_the_protocol_from_reflection(directory: Path) -> None:
    async def test(bench: RouterBench, stub: Any) -> None:
        def names() -> list[str]:
            with grpc.insecure_channel(bench.channel_target) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                pool = DescriptorPool(database)
                service = pool.FindServiceByName("vllm.grpc.engine.VllmEngine")
                return [method.name for method in service.methods]

        assert "Generate" in await asyncio.to_thread(names)

    run(directory, test, FakeWorker("w"))


def test_without_the_message_types_the_rest_is_served(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.api.grpc_server.importlib.util.find_spec", lambda _: None)

    async def test(bench: RouterBench, stub: Any) -> None:
        code, _ = await refusal(stub, asking())
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert await bench.ask("abc")

    run(directory, test, FakeWorker("w"))
