"""Client messages to the router's types, and back. No checks beyond what types need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry import convert
from kvferry.errors import InvalidInput, KvferryError
from kvferry.rpc.v1 import inference_pb2
from router.request import (
    ChatInput,
    ChatMessage,
    ClientRequest,
    ServiceClass,
    TextInput,
    TokenInput,
    Tool,
    ToolCall,
)

if TYPE_CHECKING:
    from kvferry.audit_report import AuditReport
    from kvferry.ids import WorkerId
    from kvferry.trace_context import TraceContext
    from router.fleet import WorkerSummary
    from router.request import Finish, PromptInput, ResponseChunk, Usage

_SERVICE_CLASSES = {
    inference_pb2.SERVICE_CLASS_STANDARD: ServiceClass.STANDARD,
    inference_pb2.SERVICE_CLASS_INTERACTIVE: ServiceClass.INTERACTIVE,
    inference_pb2.SERVICE_CLASS_BATCH: ServiceClass.BATCH,
}


def request_from_wire(
    message: inference_pb2.GenerateRequest,
    *,
    seed: int,
    timeout_s: float | None,
    tenant: str,
    trace: TraceContext | None = None,
) -> ClientRequest:
    """`seed` is used where the client set none; `tenant` pays; `trace` is the client's span.

    Raises `InvalidInput` for an id beyond int32, and for a kind of sharing or a class of service
    that we do not know.
    """
    return ClientRequest(
        request_id=message.request_id,
        model=message.model,
        input=_input_from_wire(message),
        sampling=convert.sampling_from_wire(message.sampling, seed),
        cache_salt=message.cache_salt,
        sharing=convert.sharing_from_wire(message.sharing),
        priority=message.priority,
        service_class=_service_class_from_wire(message.service_class),
        tenant=tenant,
        timeout_s=timeout_s,
        trace=trace,
    )


def chunk_to_wire(chunk: ResponseChunk) -> inference_pb2.GenerateResponse:
    """Logprobs come for all tokens of a chunk or for none."""
    tokens = chunk.tokens
    message = inference_pb2.GenerateResponse(
        request_id=chunk.request_id,
        text=chunk.text,
        token_ids=[token.token_id for token in tokens],
        index=chunk.index,
    )
    if tokens and tokens[0].logprobs is not None:
        message.logprobs.extend(
            convert.logprobs_to_wire(token.logprobs)
            for token in tokens
            if token.logprobs is not None
        )
    if chunk.finish is not None:
        message.finish.CopyFrom(_finish_to_wire(chunk.finish))
    return message


def summary_to_wire(summary: WorkerSummary) -> inference_pb2.WorkerSummary:
    """What only the worker knows is left out before its first answer."""
    message = inference_pb2.WorkerSummary(
        worker_id=summary.info.worker_id,
        role=summary.info.role.value,
        incarnation=summary.info.incarnation,
        address=summary.info.address,
        reachable=summary.is_reachable,
        indexed_blocks=summary.indexed_blocks,
        kv_index=inference_pb2.KvIndex(
            known_to=summary.index.known_to,
            full=summary.index.is_full,
            silence_s=summary.events_age_s,
        ),
        draining=summary.info.is_draining,
    )
    status = summary.status
    if status is not None:
        told = inference_pb2.WorkerSummary(
            pid=status.pid,
            load=convert.load_to_wire(status.load),
            accounts=convert.accounts_to_wire(status.accounts),
            host_accounts=convert.host_accounts_to_wire(status.host_accounts),
            counters=status.counters,
        )
        message.MergeFrom(told)
    return message


def audit_to_wire(
    worker_id: WorkerId, outcome: AuditReport | KvferryError
) -> inference_pb2.WorkerAudit:
    """The report, or the reason why there is none."""
    message = inference_pb2.WorkerAudit(worker_id=worker_id)
    if isinstance(outcome, KvferryError):
        message.failure = str(outcome)
    else:
        message.report.CopyFrom(convert.audit_report_to_wire(outcome))
    return message


def _input_from_wire(message: inference_pb2.GenerateRequest) -> PromptInput | None:
    match message.WhichOneof("input"):
        case "text":
            return TextInput(message.text)
        case "token_ids":
            return TokenInput(convert.token_ids_from_wire(message.token_ids.ids))
        case "chat":
            return _chat_from_wire(message.chat)
        case _:
            return None


def _chat_from_wire(chat: inference_pb2.Chat) -> ChatInput:
    tools = (Tool(tool.name, tool.description, tool.parameters) for tool in chat.tools)
    turns = map(_turn_from_wire, chat.messages)
    return ChatInput(tuple(turns), tuple(tools), chat.template_options)


def _turn_from_wire(turn: inference_pb2.ChatMessage) -> ChatMessage:
    calls = (ToolCall(call.id, call.name, call.arguments) for call in turn.tool_calls)
    return ChatMessage(turn.role, turn.content, tuple(calls), turn.tool_call_id, turn.name)


def _service_class_from_wire(value: inference_pb2.ServiceClass) -> ServiceClass:
    known = _SERVICE_CLASSES.get(value)
    if known is None:
        names = ", ".join(inference_pb2.ServiceClass.keys())
        raise InvalidInput("service_class", f"is {int(value)}; must be one of {names}")
    return known


def _finish_to_wire(finish: Finish) -> inference_pb2.Finish:
    return inference_pb2.Finish(
        reason=convert.finish_reason_to_wire(finish.reason),
        stop_string=finish.stop_string,
        usage=None if finish.usage is None else _usage_to_wire(finish.usage),
    )


def _usage_to_wire(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        prefill_hit_tokens=usage.kv.prefill_hit_tokens,
        host_hit_tokens=usage.kv.host_hit_tokens,
        decode_hit_tokens=usage.kv.decode_hit_tokens,
        moved_tokens=usage.kv.moved_tokens,
        moved_bytes=usage.kv.moved_bytes,
        handoff_ms=usage.kv.handoff_ms,
        ttft_ms=usage.ttft_ms,
        itl_ms=usage.itl_ms,
        prefill_worker=usage.prefill_worker or "",
        decode_worker=usage.decode_worker or "",
        attempt=usage.attempt,
    )
