"""Bad input gets a status and a message that names the field; the cluster goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from kvferry.config import load_config
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.in_process_cluster import InProcessCluster, collect

if TYPE_CHECKING:
    from collections.abc import Iterator

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(load_config(None, {}, {}), (Role.PREFILL, Role.DECODE)) as running:
        yield running


def _request(**fields: object) -> inference.GenerateRequest:
    sampling = inference.SamplingParams(**{"max_tokens": 4} | fields.pop("sampling", {}))
    return inference.GenerateRequest(**{"text": "Hello"} | fields, sampling=sampling)


BAD = {
    "empty prompt": (_request(text=""), CODE.INVALID_ARGUMENT, "text"),
    "no prompt": (inference.GenerateRequest(), CODE.INVALID_ARGUMENT, "input"),
    "no token ids": (
        inference.GenerateRequest(token_ids=inference.TokenIds()),
        CODE.INVALID_ARGUMENT,
        "token_ids",
    ),
    "over-long prompt": (_request(text="word " * 9000), CODE.INVALID_ARGUMENT, "text"),
    "unknown token id": (
        inference.GenerateRequest(token_ids=inference.TokenIds(ids=[1, 4_000_000_000])),
        CODE.INVALID_ARGUMENT,
        "token_ids",
    ),
    "negative temperature": (
        _request(sampling={"temperature": -1.0}),
        CODE.INVALID_ARGUMENT,
        "temperature",
    ),
    "NaN temperature": (
        _request(sampling={"temperature": float("nan")}),
        CODE.INVALID_ARGUMENT,
        "temperature",
    ),
    "top_p of 2": (_request(sampling={"top_p": 2.0}), CODE.INVALID_ARGUMENT, "top_p"),
    "unknown model": (_request(model="gpt-17"), CODE.NOT_FOUND, "model"),
    "10,000 stop strings": (
        _request(sampling={"stop": ["x"] * 10_000}),
        CODE.INVALID_ARGUMENT,
        "stop",
    ),
    "max_tokens of 0": (_request(sampling={"max_tokens": 0}), CODE.INVALID_ARGUMENT, "max_tokens"),
    "empty chat": (
        inference.GenerateRequest(chat=inference.Chat()),
        CODE.INVALID_ARGUMENT,
        "messages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_field_is_named(cluster: InProcessCluster, name: str) -> None:
    request, code, field = BAD[name]
    with pytest.raises(grpc.RpcError) as caught:
        collect(cluster.stub.Generate(request, timeout=60))
    assert caught.value.code() is code
    assert field in caught.value.details()
    _assert_serves(cluster)


def _raw_generate(cluster: InProcessCluster, body: bytes) -> grpc.RpcError:
    with grpc.insecure_channel(
        cluster.address, options=[("grpc.max_send_message_length", 2**30)]
    ) as channel:
        call = channel.unary_stream("/kvferry.rpc.v1.Inference/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(body, timeout=30))
    return caught.value


def test_invalid_utf8_names_the_field(cluster: InProcessCluster) -> None:
    # Field 3 (text), length-delimited, two bytes that are not UTF-8.
    error = _raw_generate(cluster, b"\x1a\x02\xff\xfe")
    assert error.code() is CODE.INVALID_ARGUMENT
    assert "text" in error.details()
    _assert_serves(cluster)


def test_garbage_is_refused(cluster: InProcessCluster) -> None:
    error = _raw_generate(cluster, b"\xff" * 100)
    assert error.code() is CODE.INVALID_ARGUMENT
    _assert_serves(cluster)


def test_100_mb_message_is_refused(cluster: InProcessCluster) -> None:
    request = inference.GenerateRequest(text="a" * 100_000_000)
    error = _raw_generate(cluster, request.SerializeToString())
    assert error.code() is CODE.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()
    _assert_serves(cluster)


def _assert_serves(cluster: InProcessCluster) -> None:
    answer = collect(cluster.stub.Generate(_request(), timeout=60))
    assert 1 <= len(answer.token_ids) <= 4
    cluster.wait_idle()
