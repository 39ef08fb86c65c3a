"""Messages that no client of ours would send: none makes a fault or leaves a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor as Field
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.rpc.v1 import inference_pb2
from tests.support.fake_worker import FakeWorker
from tests.support.fuzz_target import FILES_GROWN_MAX, fuzz_target, open_files
from tests.support.router_model import write_model
from tests.support.served_router import served_router

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.router_bench import RouterBench

METHODS = {
    "/kvferry.rpc.v1.Inference/Generate": inference_pb2.GenerateRequest,
    "/kvferry.rpc.v1.Inference/Cancel": inference_pb2.CancelRequest,
    "/kvferry.rpc.v1.Admin/Audit": inference_pb2.AuditRequest,
}
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
INTEGERS = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
    Field.CPPTYPE_ENUM: (-1, 100),
}
Message = Any


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterBench]:
    directory = write_model(tmp_path_factory.mktemp("model"))
    with served_router(directory, FakeWorker("w"), requests_max=256) as served:
        yield served


def values_of(field: Any) -> st.SearchStrategy[Any]:
    """Extreme ones among them."""
    if field.cpp_type in INTEGERS:
        low, high = INTEGERS[field.cpp_type]
        return st.sampled_from([low, high, 0, 1, 2]) | st.integers(low, high)
    if field.cpp_type in (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE):
        return st.floats(width=32) | st.sampled_from([0.0, 1.0, 0.5])
    if field.cpp_type == Field.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == Field.CPPTYPE_MESSAGE:
        return messages(message_factory.GetMessageClass(field.message_type))
    return st.text(max_size=20) | st.sampled_from(["user", "x" * 600, "{}"])


def messages(kind: Any) -> st.SearchStrategy[Message]:
    """Any subset of the fields, each with any value."""
    fields = {}
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            fields[field.name] = st.dictionaries(values_of(key), values_of(value), max_size=3)
        elif field.is_repeated:
            fields[field.name] = st.lists(values_of(field), max_size=3)
        else:
            fields[field.name] = values_of(field)
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: kind(**given))


def mutated(message: Message) -> st.SearchStrategy[bytes]:
    """Its bytes with a few of them changed, left out or put in."""
    data = message.SerializeToString()
    edits = st.lists(
        st.tuples(st.integers(0, max(0, len(data) - 1)), st.binary(max_size=3)), max_size=3
    )
    return edits.map(lambda changes: _edited(data, changes))


def _edited(data: bytes, edits: list[tuple[int, bytes]]) -> bytes:
    for position, replacement in edits:
        data = data[:position] + replacement + data[position + 1 :]
    return data


def call(channel: grpc.Channel, method: str, data: bytes) -> None:
    """Fails unless it is answered, or refused with the name of a field."""
    refusal = None
    try:
        for _ in channel.unary_stream(method)(data, timeout=60):
            pass
    except grpc.RpcError as error:
        refusal = error
    if refusal is not None:
        assert refusal.code() in REFUSALS, (method, data, refusal)
        field, _, problem = refusal.details().partition(":")
        assert problem.strip(), refusal.details()
        assert " " not in field.split("(")[0].strip(), refusal.details()


def fuzz(target: str, examples: int) -> None:
    some = st.one_of(
        *(
            st.tuples(
                st.just(method),
                messages(kind).flatmap(mutated) | st.binary(max_size=64),
            )
            for method, kind in METHODS.items()
        )
    )
    with grpc.insecure_channel(target) as channel:

        @given(some)
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        def is_answered_or_refused(case: tuple[str, bytes]) -> None:
            call(channel, *case)

        is_answered_or_refused()


def test_a_sample(bench: RouterBench) -> None:
    fuzz(bench.channel_target, 60)


@pytest.mark.slow
def test_many_leave_workers_as_they_were(tmp_path: Path) -> None:
    with fuzz_target(tmp_path) as target:
        fuzz(target.channel_target, 100)
        files = open_files()
        fuzz(target.channel_target, 10_000)
        target.assert_nothing_left()
        assert open_files() < files + FILES_GROWN_MAX


def test_a_client_that_knows_nothing_but_the_address(bench: RouterBench) -> None:
    """Reflection tells all that is needed to ask and to read the answer."""
    with grpc.insecure_channel(bench.channel_target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "kvferry.rpc.v1.Inference" in database.get_services()
        pool = descriptor_pool.DescriptorPool(database)
        service = pool.FindServiceByName("kvferry.rpc.v1.Inference")
        method = service.FindMethodByName("Generate")
        assert method.server_streaming
        request_kind = message_factory.GetMessageClass(method.input_type)
        answer_kind = message_factory.GetMessageClass(method.output_type)
        assert request_kind is not inference_pb2.GenerateRequest
        call_of = channel.unary_stream(
            f"/{service.full_name}/{method.name}",
            request_serializer=request_kind.SerializeToString,
            response_deserializer=answer_kind.FromString,
        )
        request = request_kind(text="abc", sampling={"max_tokens": 5})
        answers = list(call_of(request, timeout=60))
    assert "".join(answer.text for answer in answers) == "abc"
    assert answers[-1].finish.usage.completion_tokens == 3
