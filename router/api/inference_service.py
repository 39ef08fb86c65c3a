"""`kvferry.rpc.v1.Inference`: what clients call. Handlers take serialized messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from kvferry.rpc.v1 import inference_pb2
from kvferry.rpc_errors import status_of_errors
from router.api.bounded_answer import bounded_answer
from router.api.message_parsing import parse_message
from router.api.messages import chunk_to_wire, request_from_wire
from router.api.security import account_of
from router.api.security_guard import (
    calling_span,
    calling_tenant,
    ends_requests_of,
    named_tenant,
)

if TYPE_CHECKING:
    from router.api.request_metrics import RequestMetrics
    from router.router import Router

INFERENCE_SERVICE: str = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceService:
    """Translates between messages and the router."""

    def __init__(self, router: Router, metrics: RequestMetrics) -> None:
        """`metrics` count the requests."""
        self._router = router
        self._answers = metrics

    def handler(self) -> Any:
        """To be registered at a server. No deserializers: see `message_parsing`."""
        return grpc.method_handlers_generic_handler(
            INFERENCE_SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.generate,
                    response_serializer=inference_pb2.GenerateResponse.SerializeToString,
                ),
                "Cancel": grpc.unary_unary_rpc_method_handler(
                    self.cancel,
                    response_serializer=inference_pb2.CancelResponse.SerializeToString,
                ),
                "ModelInfo": grpc.unary_unary_rpc_method_handler(
                    self.model_info,
                    response_serializer=inference_pb2.ModelInfoResponse.SerializeToString,
                ),
            },
        )

    async def generate(self, data: bytes, context: Any) -> None:
        """Stream the answer. A client that goes away cancels this coroutine, and so the request."""
        async with status_of_errors(context):
            message = parse_message(inference_pb2.GenerateRequest, data)
            request = request_from_wire(
                message,
                seed=self._router.draw_seed(),
                timeout_s=context.time_remaining(),
                tenant=account_of(calling_tenant(), named_tenant(context), message.tenant),
                trace=calling_span(context),
            )
            async with bounded_answer(self._answers, request) as chunks:
                async for chunk in chunks:
                    await context.write(chunk_to_wire(chunk))

    async def cancel(self, data: bytes, context: Any) -> inference_pb2.CancelResponse:
        """End a request by its id."""
        answer = inference_pb2.CancelResponse()
        async with status_of_errors(context):
            message = parse_message(inference_pb2.CancelRequest, data)
            answer.found = self._router.cancel(message.request_id, ends_requests_of())
        return answer

    async def model_info(self, data: bytes, context: Any) -> inference_pb2.ModelInfoResponse:
        """What this cluster serves."""
        router = self._router
        async with status_of_errors(context):
            parse_message(inference_pb2.ModelInfoRequest, data)
        return inference_pb2.ModelInfoResponse(
            model=router.config.model.served_name,
            vocab_size=router.card.vocab_size,
            context_length=router.card.context_length,
            eos_token_ids=router.card.eos_token_ids,
            page_size=router.config.cache.page_size,
            dtype=router.config.model.dtype.value,
            chat_template=router.tokenizer.has_chat_template,
            adapters=router.models.adapters,
        )
