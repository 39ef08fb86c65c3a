"""Routers of a kvferry cluster, asked over `kvferry.rpc.v1.Inference`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from bench.answer import Failure, Refusal
from kvferry.errors import STATUS, ErrorKind, InvalidInput
from kvferry.limits import CLIENT_MESSAGE_BYTES_MAX
from kvferry.rpc.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from bench.answer import Answer
    from bench.plan import EndpointPlan
    from bench.workload import Prompt

_REFUSALS = (
    ErrorKind.INVALID_INPUT,
    ErrorKind.UNAUTHENTICATED,
    ErrorKind.FORBIDDEN,
    ErrorKind.NOT_FOUND,
    ErrorKind.ALREADY_EXISTS,
    ErrorKind.OVERLOADED,
)
"""Said of a request, not of what became of it."""
_REFUSAL_CODES = frozenset(STATUS[kind].grpc for kind in _REFUSALS)


class GrpcEndpoint:
    """One channel to each router; requests go to them in turn, by their index.

    A request whose router fails is not asked again elsewhere: it has failed.
    """

    def __init__(self, plan: EndpointPlan, api_key: str = "") -> None:
        """Connects at the first use. Raises `InvalidInput` for files that cannot be read."""
        self._plan = plan
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channels = [_open(address, plan) for address in plan.addresses]
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]

    async def ask(self, answer: Answer, prompt: Prompt, answer_tokens: int) -> None:
        """See `bench.answer.Endpoint`."""
        request = _request(self._plan.model, prompt, answer_tokens)
        stub = self._stubs[answer.index % len(self._stubs)]
        answer.sends()
        call = stub.Generate(request, metadata=self._metadata)
        is_whole = False
        try:
            async for response in call:
                if response.token_ids:
                    answer.brings(len(response.token_ids))
                if response.HasField("finish"):
                    is_whole = True
                    _take_usage(answer, response.finish)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            refused = code in _REFUSAL_CODES and not answer.arrivals
            raise (Refusal if refused else Failure)(code) from error
        finally:
            # Of no effect on a call that has ended.
            call.cancel()
        if not is_whole:
            raise Failure("no end")

    async def close(self) -> None:
        """Calls that run are cancelled."""
        for channel in self._channels:
            await channel.close()


def _request(model: str, prompt: Prompt, answer_tokens: int) -> Any:
    sampling = inference_pb2.SamplingParams(
        # The answer has the length that the workload asks for.
        temperature=0.0,
        max_tokens=answer_tokens,
        ignore_eos=True,
    )
    request = inference_pb2.GenerateRequest(model=model, sampling=sampling)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt.tolist())
    return request


def _take_usage(answer: Answer, finish: Any) -> None:
    if not finish.HasField("usage"):
        return
    told, usage = finish.usage, answer.usage
    usage.prompt_tokens = told.prompt_tokens
    usage.answer_tokens = told.completion_tokens
    # An attempt that goes on with an answer may find more than the prompt.
    usage.cached_tokens = min(told.prompt_tokens, told.prefill_hit_tokens + told.host_hit_tokens)
    usage.moved_bytes, usage.moved_tokens = told.moved_bytes, told.moved_tokens
    usage.prefill_worker, usage.decode_worker = told.prefill_worker, told.decode_worker
    usage.attempts = told.attempt


def _open(address: str, plan: EndpointPlan) -> Any:
    options = [
        ("grpc.max_receive_message_length", CLIENT_MESSAGE_BYTES_MAX),
        ("grpc.enable_http_proxy", 0),
    ]
    if not plan.tls_ca:
        return grpc.aio.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(
        _read("tls-ca", plan.tls_ca),
        _read("tls-key", plan.tls_key) if plan.tls_key else None,
        _read("tls-certificate", plan.tls_certificate) if plan.tls_certificate else None,
    )
    return grpc.aio.secure_channel(address, credentials, options)


def _read(flag: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidInput(flag, f"cannot read {file}: {os.strerror(error.errno or 0)}") from error
