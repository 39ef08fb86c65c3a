"""`vllm.grpc.engine.VllmEngine`: what the `smg` gateway calls, as it would call one engine.

Only here when the package `smg-grpc-proto` is installed (the extra `smg`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from kvferry.errors import InvalidInput
from kvferry.rpc_errors import status_of_errors
from router.api.bounded_answer import bounded_answer
from router.api.message_parsing import parse_message
from router.api.security import account_of
from router.api.security_guard import (
    calling_span,
    calling_tenant,
    ends_requests_of,
    named_tenant,
)
from router.api.smg_answer import SmgAnswer
from router.api.smg_cluster import engine_load, model_info, scheduler_load, server_info
from router.api.smg_messages import in_words_of_smg, request_from_smg
from router.api.smg_tokenizer import tokenizer_archive, tokenizer_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from router.api.request_metrics import RequestMetrics
    from router.router import Router

_LOAD_INTERVAL_S = 1.0
"""Between two records of load to a gateway that listens."""


class SmgService:
    """Translates between the gateway's messages and the router."""

    name: str = vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name

    def __init__(self, router: Router, metrics: RequestMetrics) -> None:
        """`metrics` count the requests."""
        self._router = router
        self._answers = metrics
        self._archive: bytes | None = None
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """End what would go on for ever."""
        self._stopped.set()

    def handler(self) -> Any:
        """To be registered at a server. No deserializers: see `message_parsing`."""
        unary: dict[str, tuple[Callable[..., Any], Any]] = {
            "HealthCheck": (self.health_check, vllm.HealthCheckResponse),
            "Abort": (self.abort, vllm.AbortResponse),
            "GetModelInfo": (self.get_model_info, vllm.GetModelInfoResponse),
            "GetServerInfo": (self.get_server_info, vllm.GetServerInfoResponse),
            "GetLoads": (self.get_loads, vllm.GetLoadsResponse),
        }
        streams: dict[str, tuple[Callable[..., Any], Any]] = {
            "Generate": (self.generate, vllm.GenerateResponse),
            "GetTokenizer": (self.get_tokenizer, common_pb2.GetTokenizerChunk),
            "SubscribeKvEvents": (self.subscribe_kv_events, common_pb2.KvEventBatch),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                method, response_serializer=answer.SerializeToString
            )
            for name, (method, answer) in unary.items()
        } | {
            name: grpc.unary_stream_rpc_method_handler(
                method, response_serializer=answer.SerializeToString
            )
            for name, (method, answer) in streams.items()
        }
        return grpc.method_handlers_generic_handler(self.name, handlers)

    async def generate(self, data: bytes, context: Any) -> None:
        """Answer one prompt. A gateway that goes away ends the request."""
        async with status_of_errors(context):
            with _fields_in_words_of_smg():
                await self._generate(parse_message(vllm.GenerateRequest, data), context)

    async def _generate(self, message: vllm.GenerateRequest, context: Any) -> None:
        request = request_from_smg(
            message,
            seed=self._router.draw_seed(),
            context_length=self._router.card.context_length,
            timeout_s=context.time_remaining(),
            tenant=account_of(calling_tenant(), named_tenant(context)),
            trace=calling_span(context),
        )
        answer = SmgAnswer(
            is_streamed=message.stream, stop_token_ids=request.sampling.stop_token_ids
        )
        async with bounded_answer(self._answers, request) as chunks:
            async for chunk in chunks:
                for response in answer.take(chunk):
                    await context.write(response)

    async def health_check(self, data: bytes, context: Any) -> vllm.HealthCheckResponse:
        """Healthy while some worker that decodes can be reached."""
        async with status_of_errors(context):
            parse_message(vllm.HealthCheckRequest, data)
        if self._router.is_ready:
            return vllm.HealthCheckResponse(healthy=True, message="ready")
        return vllm.HealthCheckResponse(healthy=False, message="no worker that decodes answers")

    async def abort(self, data: bytes, context: Any) -> vllm.AbortResponse:
        """End requests by their ids; those that are over already are none of its business."""
        async with status_of_errors(context):
            for request_id in parse_message(vllm.AbortRequest, data).request_ids:
                self._router.cancel(request_id, ends_requests_of())
        return vllm.AbortResponse()

    async def get_model_info(self, data: bytes, context: Any) -> vllm.GetModelInfoResponse:
        """What this cluster serves."""
        answer = vllm.GetModelInfoResponse()
        async with status_of_errors(context):
            parse_message(vllm.GetModelInfoRequest, data)
            answer.MergeFrom(model_info(self._router))
        return answer

    async def get_server_info(self, data: bytes, context: Any) -> vllm.GetServerInfoResponse:
        """How it serves."""
        async with status_of_errors(context):
            parse_message(vllm.GetServerInfoRequest, data)
        return server_info(self._router)

    async def get_loads(self, data: bytes, context: Any) -> vllm.GetLoadsResponse:
        """The load of all workers, as that of rank 0."""
        async with status_of_errors(context):
            parse_message(vllm.GetLoadsRequest, data)
        return vllm.GetLoadsResponse(dp_rank_count=1, loads=[scheduler_load(self._router)])

    async def get_tokenizer(self, data: bytes, context: Any) -> None:
        """The tokenizer's files."""
        async with status_of_errors(context):
            parse_message(common_pb2.GetTokenizerRequest, data)
            if self._archive is None:
                # Compressing takes some 100 ms.
                directory = self._router.model_directory
                self._archive = await asyncio.to_thread(tokenizer_archive, directory)
            for chunk in tokenizer_chunks(self._archive):
                await context.write(chunk)

    async def subscribe_kv_events(self, data: bytes, context: Any) -> None:
        """Records of load, without events: which worker has a prompt is this router's business.

        A gateway takes a worker for dead that sends no metadata within 2 s. One that does not
        know records without events before the first event gets none.
        """
        async with status_of_errors(context):
            asked = parse_message(common_pb2.SubscribeKvEventsRequest, data)
            await context.send_initial_metadata(())
            sample = 0
            while not self._stopped.is_set():
                if asked.load_records_before_first_batch:
                    sample += 1
                    load = engine_load(self._router)
                    load.sample, load.load_only = sample, True
                    await context.write(common_pb2.KvEventBatch(load=load))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), _LOAD_INTERVAL_S)


@contextlib.contextmanager
def _fields_in_words_of_smg() -> Iterator[None]:
    try:
        yield
    except InvalidInput as error:
        raise in_words_of_smg(error) from error
