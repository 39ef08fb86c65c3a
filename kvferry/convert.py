"""The one place where protobuf messages of the client and worker APIs become our types.

Messages of the handoff are converted in `kv_transfer.wire`, beside the types they become.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.accounts import HostAccounts, KvAccounts, WorkerLoad
from kvferry.attempt_marks import AttemptMarks, PromptMarks
from kvferry.audit_report import AuditReport
from kvferry.cache_key import CacheUse, Sharing
from kvferry.errors import InvalidInput
from kvferry.generation import (
    AttemptFinish,
    AttemptOutput,
    AttemptRequest,
    AttemptUsage,
    FinishReason,
    OutputToken,
    PrefillSource,
    SampleProgress,
    TokenLogprobs,
)
from kvferry.ids import AdapterId, Attempt, AttemptId, ExtraKey, Incarnation, RequestId, WorkerId
from kvferry.kv_events import (
    BLOCK_DIGEST_BYTES,
    AllBlocksCleared,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
)
from kvferry.rpc.v1 import handoff_pb2 as handoff
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.rpc.v1 import worker_pb2 as worker
from kvferry.sampling import Constraint, ConstraintKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.ids import TokenIds

_FINISH_TO_WIRE = {
    FinishReason.STOP: inference.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference.FINISH_REASON_CANCELLED,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}

_SHARING_TO_WIRE = {
    Sharing.SHARED: inference.SHARING_SHARED,
    Sharing.RECOMPUTED: inference.SHARING_RECOMPUTED,
    Sharing.PRIVATE: inference.SHARING_PRIVATE,
}
_SHARING_FROM_WIRE = {wire: sharing for sharing, wire in _SHARING_TO_WIRE.items()}

_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "n",
)


def finish_reason_to_wire(reason: FinishReason) -> inference.FinishReason:
    """The enum value that clients see."""
    return _FINISH_TO_WIRE[reason]


def token_ids_from_wire(ids: Sequence[int]) -> TokenIds:
    """uint32 ids as an int32 array. Raises `InvalidInput` for an id that int32 cannot hold."""
    # A message's field copies itself into an array: seven times faster than taking its ids singly.
    wide = np.asarray(ids, dtype=np.int64)
    if wide.size and int(wide.max()) > np.iinfo(np.int32).max:
        raise InvalidInput("token_ids", f"{int(wide.max())} is not a token id")
    return wide.astype(np.int32)


def sampling_from_wire(message: inference.SamplingParams, seed: int) -> SamplingParams:
    """`seed` is used where the message has none. Values are not validated here."""
    given = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    return SamplingParams(
        **{"seed": seed} | given,
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        constraint=_constraint_from_wire(message),
    )


def _constraint_from_wire(message: inference.SamplingParams) -> Constraint | None:
    name = message.WhichOneof("constraint")
    return None if name is None else Constraint(ConstraintKind(name), getattr(message, name))


def sampling_to_wire(params: SamplingParams) -> inference.SamplingParams:
    """Every field set, except `logprobs` when it is None."""
    message = inference.SamplingParams(
        logit_bias=dict(params.logit_bias),
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )
    for name in _SCALARS:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    if params.constraint is not None:
        setattr(message, params.constraint.kind.value, params.constraint.text)
    return message


def sharing_to_wire(sharing: Sharing) -> inference.Sharing:
    """The enum value that clients send."""
    return _SHARING_TO_WIRE[sharing]


def sharing_from_wire(sharing: inference.Sharing) -> Sharing:
    """Raises `InvalidInput` for a value that this version does not know."""
    known = _SHARING_FROM_WIRE.get(sharing)
    if known is None:
        names = ", ".join(inference.Sharing.keys())
        raise InvalidInput("sharing", f"is {int(sharing)}; must be one of {names}")
    return known


def cache_use_fields(use: CacheUse) -> dict[str, Any]:
    """The fields of each message that carries a `CacheUse`; all use the same names."""
    return {
        "extra_key": use.extra_key,
        "sharing": _SHARING_TO_WIRE[use.sharing],
        "priority": use.priority,
        "adapter": use.adapter,
    }


def cache_use_from_wire(
    message: worker.AttemptRequest | handoff.Prefill | handoff.KvOffer,
) -> CacheUse:
    """The inverse of `cache_use_fields`. Raises `InvalidInput`."""
    return CacheUse(
        ExtraKey(message.extra_key),
        sharing_from_wire(message.sharing),
        message.priority,
        AdapterId(message.adapter),
    )


def attempt_request_to_wire(
    request: AttemptRequest, incarnation: Incarnation
) -> worker.AttemptRequest:
    """`incarnation` is that of the worker the request is meant for."""
    message = worker.AttemptRequest(
        request_id=request.id.request_id,
        attempt=request.id.attempt,
        incarnation=incarnation,
        prompt=request.prompt.tolist(),
        sampling=sampling_to_wire(request.sampling),
        resumed=[
            worker.SampleProgress(token_ids=sample.token_ids, ended=sample.is_done)
            for sample in request.resumed
        ],
        goes_first=request.goes_first,
        **cache_use_fields(request.cache_use),
    )
    if request.source is not None:
        message.source.worker_id = request.source.worker_id
        message.source.address = request.source.address
        message.source.incarnation = request.source.incarnation
    return message


def attempt_request_from_wire(message: worker.AttemptRequest) -> AttemptRequest:
    """The attempt without the incarnation it was meant for."""
    source = None
    if message.HasField("source"):
        source = PrefillSource(
            worker_id=WorkerId(message.source.worker_id),
            address=message.source.address,
            incarnation=Incarnation(message.source.incarnation),
        )
    return AttemptRequest(
        id=AttemptId(RequestId(message.request_id), Attempt(message.attempt)),
        prompt=token_ids_from_wire(message.prompt),
        sampling=sampling_from_wire(message.sampling, seed=0),
        cache_use=cache_use_from_wire(message),
        source=source,
        resumed=tuple(
            SampleProgress(tuple(sample.token_ids), sample.ended) for sample in message.resumed
        ),
        goes_first=message.goes_first,
    )


def logprobs_to_wire(logprobs: TokenLogprobs) -> inference.TokenLogprobs:
    """Chosen token first, then the alternatives, best first."""
    return inference.TokenLogprobs(
        chosen=inference.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[inference.TokenLogprob(token_id=tok, logprob=val) for tok, val in logprobs.top],
    )


def logprobs_from_wire(message: inference.TokenLogprobs) -> TokenLogprobs:
    """The inverse of `logprobs_to_wire`."""
    return TokenLogprobs(
        token_id=message.chosen.token_id,
        logprob=message.chosen.logprob,
        top=tuple((entry.token_id, entry.logprob) for entry in message.top),
    )


def attempt_output_to_wire(output: AttemptOutput, number: int) -> worker.AttemptOutput:
    """Tokens of one output either all carry logprobs or none does. `number` is the attempt's."""
    message = worker.AttemptOutput(
        number=number,
        token_ids=[token.token_id for token in output.tokens],
        sample=output.sample,
    )
    if output.tokens and output.tokens[0].logprobs is not None:
        message.logprobs.extend(
            logprobs_to_wire(token.logprobs)
            for token in output.tokens
            if token.logprobs is not None
        )
    if output.finish is not None:
        reason = _FINISH_TO_WIRE[output.finish.reason]
        usage = _usage_fields(output.finish.usage)
        message.finish.CopyFrom(worker.AttemptFinish(reason=reason, **usage))
    if output.usage is not None:
        message.usage.CopyFrom(worker.AttemptUsage(**_usage_fields(output.usage)))
    if output.marks is not None:
        message.marks.CopyFrom(_marks_to_wire(output.marks))
    return message


def attempt_output_from_wire(message: worker.AttemptOutput) -> AttemptOutput:
    """The inverse of `attempt_output_to_wire`, but for the number."""
    finish = None
    if message.HasField("finish"):
        finish = AttemptFinish(
            reason=_FINISH_FROM_WIRE[message.finish.reason],
            usage=AttemptUsage(**_usage_fields(message.finish)),
        )
    usage = AttemptUsage(**_usage_fields(message.usage)) if message.HasField("usage") else None
    if logprobs := message.logprobs:
        tokens = tuple(
            OutputToken(token_id, logprobs_from_wire(entry))
            for token_id, entry in zip(message.token_ids, logprobs, strict=True)
        )
    else:
        tokens = tuple(map(OutputToken, message.token_ids))
    marks = _marks_from_wire(message.marks) if message.HasField("marks") else None
    return AttemptOutput(tokens, finish, usage, message.sample, marks)


_USAGE = tuple(name for name in AttemptUsage.__dataclass_fields__ if name != "source_marks")
_PROMPT_MARKS = tuple(PromptMarks.__dataclass_fields__)
_ATTEMPT_MARKS = tuple(name for name in AttemptMarks.__dataclass_fields__ if name != "source")


def _usage_fields(source: Any) -> dict[str, Any]:
    """Of our type and of both messages alike; all use the same names."""
    return {name: getattr(source, name) for name in _USAGE}


def prompt_marks_to_wire(marks: PromptMarks) -> handoff.PromptMarks:
    """Field by field; both sides use the same names."""
    return handoff.PromptMarks(**{name: getattr(marks, name) for name in _PROMPT_MARKS})


def prompt_marks_from_wire(message: handoff.PromptMarks) -> PromptMarks:
    """The inverse of `prompt_marks_to_wire`."""
    return PromptMarks(**{name: getattr(message, name) for name in _PROMPT_MARKS})


def _marks_to_wire(marks: AttemptMarks) -> worker.AttemptMarks:
    message = worker.AttemptMarks(**{name: getattr(marks, name) for name in _ATTEMPT_MARKS})
    if marks.source is not None:
        message.source.CopyFrom(prompt_marks_to_wire(marks.source))
    return message


def _marks_from_wire(message: worker.AttemptMarks) -> AttemptMarks:
    passed = {name: getattr(message, name) for name in _ATTEMPT_MARKS if message.HasField(name)}
    source = prompt_marks_from_wire(message.source) if message.HasField("source") else None
    return AttemptMarks(**passed, source=source)


def kv_batch_to_wire(batch: KvEventBatch) -> worker.KvEventBatch:
    """Events keep their order."""
    return worker.KvEventBatch(
        worker_id=batch.worker_id,
        incarnation=batch.incarnation,
        sequence=batch.sequence,
        snapshot=batch.snapshot,
        events=[_kv_event_to_wire(event) for event in batch.events],
        expected=batch.expected,
    )


def _kv_event_to_wire(event: KvEvent) -> worker.KvEvent:
    match event:
        case BlocksStored(block_hashes):
            return worker.KvEvent(stored=worker.BlocksStored(block_hashes=block_hashes))
        case BlocksRemoved(block_hashes):
            return worker.KvEvent(removed=worker.BlocksRemoved(block_hashes=block_hashes))
        case AllBlocksCleared():
            return worker.KvEvent(cleared=worker.AllBlocksCleared())


def kv_batch_from_wire(message: worker.KvEventBatch) -> KvEventBatch:
    """The inverse of `kv_batch_to_wire`. Raises `InvalidInput` for what is not ours."""
    if any(len(digests) % BLOCK_DIGEST_BYTES for digests in message.expected):
        raise InvalidInput("expected", f"hashes have {BLOCK_DIGEST_BYTES} bytes each")
    return KvEventBatch(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        sequence=message.sequence,
        snapshot=message.snapshot,
        events=tuple(_kv_event_from_wire(event) for event in message.events),
        expected=tuple(message.expected),
    )


def _kv_event_from_wire(message: worker.KvEvent) -> KvEvent:
    match message.WhichOneof("kind"):
        case "stored":
            return BlocksStored(tuple(map(BlockHash, message.stored.block_hashes)))
        case "removed":
            return BlocksRemoved(tuple(map(BlockHash, message.removed.block_hashes)))
        case "cleared":
            return AllBlocksCleared()
        case kind:
            raise InvalidInput("events", f"kind {kind!r} is not known")


_ACCOUNTS = tuple(KvAccounts.__dataclass_fields__)
_HOST_ACCOUNTS = tuple(HostAccounts.__dataclass_fields__)
_LOAD = tuple(WorkerLoad.__dataclass_fields__)


def accounts_to_wire(accounts: KvAccounts) -> inference.KvAccounts:
    """Field by field; both sides use the same names."""
    return inference.KvAccounts(**{name: getattr(accounts, name) for name in _ACCOUNTS})


def accounts_from_wire(message: inference.KvAccounts) -> KvAccounts:
    """The inverse of `accounts_to_wire`."""
    return KvAccounts(**{name: getattr(message, name) for name in _ACCOUNTS})


def host_accounts_to_wire(accounts: HostAccounts | None) -> inference.HostAccounts | None:
    """Field by field; a field of a message that is None is not set."""
    if accounts is None:
        return None
    return inference.HostAccounts(**{name: getattr(accounts, name) for name in _HOST_ACCOUNTS})


def host_accounts_from_wire(
    message: worker.WorkerStatusResponse | inference.AuditReport,
) -> HostAccounts | None:
    """Those in a message that may have some."""
    if not message.HasField("host_accounts"):
        return None
    return HostAccounts(**{name: getattr(message.host_accounts, name) for name in _HOST_ACCOUNTS})


def load_to_wire(load: WorkerLoad) -> inference.WorkerLoad:
    """Field by field; both sides use the same names."""
    return inference.WorkerLoad(**{name: getattr(load, name) for name in _LOAD})


def load_from_wire(message: inference.WorkerLoad) -> WorkerLoad:
    """The inverse of `load_to_wire`."""
    return WorkerLoad(**{name: getattr(message, name) for name in _LOAD})


def audit_report_to_wire(report: AuditReport) -> inference.AuditReport:
    """Field by field."""
    return inference.AuditReport(
        violations=report.violations,
        accounts=accounts_to_wire(report.accounts),
        host_accounts=host_accounts_to_wire(report.host_accounts),
        duration_ms=report.duration_ms,
        engine_steps=report.engine_steps,
    )


def audit_report_from_wire(message: inference.AuditReport) -> AuditReport:
    """The inverse of `audit_report_to_wire`."""
    return AuditReport(
        violations=tuple(message.violations),
        accounts=accounts_from_wire(message.accounts),
        host_accounts=host_accounts_from_wire(message),
        duration_ms=message.duration_ms,
        engine_steps=message.engine_steps,
    )
