"""The one place where protobuf messages of the session become our types, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from kv_transfer.protocol.key import HandoffKey
from kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Busy,
    Closed,
    Complete,
    FirstToken,
    Grant,
    Hello,
    KvOffer,
    LinkDown,
    LinkRendezvous,
    LinkSignal,
    Prefill,
    Ready,
    Received,
    SessionMessage,
    Signal,
)
from kvferry.convert import (
    cache_use_fields,
    cache_use_from_wire,
    logprobs_from_wire,
    logprobs_to_wire,
    prompt_marks_from_wire,
    prompt_marks_to_wire,
    sampling_from_wire,
    sampling_to_wire,
    token_ids_from_wire,
)
from kvferry.errors import ErrorKind, InvalidInput
from kvferry.generation import OutputToken
from kvferry.ids import Attempt, Incarnation, RequestId, WorkerId
from kvferry.rpc.v1 import handoff_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def key_to_wire(key: HandoffKey) -> pb.HandoffKey:
    """Field by field."""
    return pb.HandoffKey(
        request_id=key.request_id,
        attempt=key.attempt,
        source_incarnation=key.source_incarnation,
        sink_incarnation=key.sink_incarnation,
    )


def key_from_wire(key: pb.HandoffKey) -> HandoffKey:
    """The inverse of `key_to_wire`."""
    return HandoffKey(
        RequestId(key.request_id),
        Attempt(key.attempt),
        Incarnation(key.source_incarnation),
        Incarnation(key.sink_incarnation),
    )


def batch_to_wire(messages: Sequence[SessionMessage]) -> pb.HandoffBatch:
    """What travels on the stream at once."""
    return pb.HandoffBatch(messages=[message_to_wire(message) for message in messages])


def batch_from_wire(raw: pb.HandoffBatch | object) -> list[SessionMessage] | None:
    """The inverse of `batch_to_wire`; None where the stream has ended. Raises `InvalidInput`."""
    if not isinstance(raw, pb.HandoffBatch):
        assert raw is grpc.aio.EOF, f"{raw!r} on a session"
        return None
    return [message_from_wire(message) for message in raw.messages]


def message_to_wire(message: SessionMessage) -> pb.HandoffMessage:
    """The envelope with its one kind set."""
    match message:
        case Hello() | LinkRendezvous() | LinkSignal() | LinkDown():
            return _unkeyed_to_wire(message)
        case Prefill():
            return pb.HandoffMessage(
                prefill=pb.Prefill(
                    key=key_to_wire(message.key),
                    prompt=message.prompt.tolist(),
                    sampling=sampling_to_wire(message.sampling),
                    layout_hash=message.layout_hash,
                    held_only=message.held_only,
                    goes_first=message.goes_first,
                    **cache_use_fields(message.cache_use),
                )
            )
        case KvOffer():
            return pb.HandoffMessage(
                kv_offer=pb.KvOffer(
                    key=key_to_wire(message.key),
                    address=message.address,
                    tokens=message.tokens.tolist(),
                    **cache_use_fields(message.cache_use),
                )
            )
        case _:
            return _plain_to_wire(message)


def _unkeyed_to_wire(message: Hello | LinkRendezvous | LinkSignal | LinkDown) -> pb.HandoffMessage:
    match message:
        case Hello():
            hello = pb.Hello(
                worker_id=message.worker_id,
                incarnation=message.incarnation,
                layout_hash=message.layout_hash,
                staging_buffer_bytes=message.staging_buffer_bytes,
                heads=message.heads,
                ranks=message.ranks,
                host=message.host,
            )
            return pb.HandoffMessage(hello=hello)
        case LinkRendezvous(generation, lane, store_key, store_value):
            entry = pb.LinkRendezvous(
                link_generation=generation,
                lane=lane,
                store_key=store_key,
                store_value=store_value,
            )
            return pb.HandoffMessage(link_rendezvous=entry)
        case LinkSignal(generation, lane, signal, value):
            told = pb.LinkSignal(
                link_generation=generation, lane=lane, kind=_SIGNAL_KINDS[signal], value=value
            )
            return pb.HandoffMessage(link_signal=told)
        case LinkDown(generation, reason):
            return pb.HandoffMessage(
                link_down=pb.LinkDown(link_generation=generation, reason=reason)
            )


_SIGNAL_KINDS = {
    Signal.CREDIT: pb.LinkSignal.KIND_CREDIT,
    Signal.SENDING: pb.LinkSignal.KIND_SENDING,
}
_SIGNALS = {kind: signal for signal, kind in _SIGNAL_KINDS.items()}

_Bare = Busy | Received | Closed | Aborted


def _plain_to_wire(
    message: Ready | Grant | FirstToken | Complete | Abort | _Bare,
) -> pb.HandoffMessage:
    key = key_to_wire(message.key)
    match message:
        case Ready(_, prompt_tokens, layout_hash, hit_tokens, host_hit_tokens):
            ready = pb.Ready(
                key=key,
                prompt_tokens=prompt_tokens,
                layout_hash=layout_hash,
                hit_tokens=hit_tokens,
                host_hit_tokens=host_hit_tokens,
            )
            return pb.HandoffMessage(ready=ready)
        case Grant(_, resume_at, stream):
            grant = pb.Grant(key=key, resume_at=resume_at, stream=stream)
            return pb.HandoffMessage(grant=grant)
        case FirstToken(_, tokens):
            first = pb.FirstToken(key=key, tokens=[_token_to_wire(token) for token in tokens])
            return pb.HandoffMessage(first_token=first)
        case Complete(_, tokens, generation, marks):
            told = None if marks is None else prompt_marks_to_wire(marks)
            complete = pb.Complete(
                key=key, tokens=tokens, link_generation=generation or 0, marks=told
            )
            return pb.HandoffMessage(complete=complete)
        case Abort(_, reason, kind):
            word = "" if kind is None else kind.value
            return pb.HandoffMessage(abort=pb.Abort(key=key, reason=reason, kind=word))
        case _:
            return _bare_to_wire(message, key)


def _bare_to_wire(message: _Bare, key: pb.HandoffKey) -> pb.HandoffMessage:
    match message:
        case Busy():
            return pb.HandoffMessage(busy=pb.Busy(key=key))
        case Received():
            return pb.HandoffMessage(received=pb.Received(key=key))
        case Closed():
            return pb.HandoffMessage(closed=pb.Closed(key=key))
        case Aborted():
            return pb.HandoffMessage(aborted=pb.Aborted(key=key))


def _token_to_wire(token: OutputToken) -> pb.SampledToken:
    sampled = pb.SampledToken(token_id=token.token_id)
    if token.logprobs is not None:
        sampled.logprobs.CopyFrom(logprobs_to_wire(token.logprobs))
    return sampled


def message_from_wire(message: pb.HandoffMessage) -> SessionMessage:
    """The inverse of `message_to_wire`.

    Raises `InvalidInput` for a kind we don't know, and for numbers that no worker can mean.
    """
    kind = message.WhichOneof("kind")
    read = _READERS.get(kind or "")
    if read is None:
        raise InvalidInput("handoff message", f"kind {kind!r} is not known")
    return read(message)


def _prefill(message: pb.HandoffMessage) -> Prefill:
    prefill = message.prefill
    return Prefill(
        key_from_wire(prefill.key),
        token_ids_from_wire(prefill.prompt),
        sampling_from_wire(prefill.sampling, seed=0),
        cache_use_from_wire(prefill),
        prefill.layout_hash,
        prefill.held_only,
        prefill.goes_first,
    )


def _kv_offer(message: pb.HandoffMessage) -> KvOffer:
    offer = message.kv_offer
    return KvOffer(
        key_from_wire(offer.key),
        offer.address,
        token_ids_from_wire(offer.tokens),
        cache_use_from_wire(offer),
    )


def _first_token(message: pb.HandoffMessage) -> FirstToken:
    first = message.first_token
    return FirstToken(key_from_wire(first.key), tuple(map(_token_from_wire, first.tokens)))


def _token_from_wire(sampled: pb.SampledToken) -> OutputToken:
    logprobs = logprobs_from_wire(sampled.logprobs) if sampled.HasField("logprobs") else None
    likely = () if logprobs is None else (logprobs.token_id, *(id_ for id_, _ in logprobs.top))
    token_ids_from_wire((sampled.token_id, *likely))
    return OutputToken(sampled.token_id, logprobs)


def _ready(message: pb.HandoffMessage) -> Ready:
    ready = message.ready
    return Ready(
        key_from_wire(ready.key),
        ready.prompt_tokens,
        ready.layout_hash,
        ready.hit_tokens,
        ready.host_hit_tokens,
    )


def _hello(message: pb.HandoffMessage) -> Hello:
    hello = message.hello
    return Hello(
        WorkerId(hello.worker_id),
        Incarnation(hello.incarnation),
        hello.layout_hash,
        hello.staging_buffer_bytes,
        hello.heads,
        hello.ranks,
        hello.host,
    )


def _rendezvous(message: pb.HandoffMessage) -> LinkRendezvous:
    entry = message.link_rendezvous
    _require_generation(entry.link_generation)
    return LinkRendezvous(entry.link_generation, entry.lane, entry.store_key, entry.store_value)


def _signal(message: pb.HandoffMessage) -> LinkSignal:
    told = message.link_signal
    _require_generation(told.link_generation)
    signal = _SIGNALS.get(told.kind)
    if signal is None:
        raise InvalidInput("link_signal.kind", f"{told.kind} is not known")
    return LinkSignal(told.link_generation, told.lane, signal, told.value)


def _require_generation(generation: int) -> None:
    if generation == 0:
        raise InvalidInput("link_generation", "is 0; generations count from 1")


def _complete(message: pb.HandoffMessage) -> Complete:
    complete = message.complete
    return Complete(
        key_from_wire(complete.key),
        complete.tokens,
        complete.link_generation or None,
        prompt_marks_from_wire(complete.marks) if complete.HasField("marks") else None,
    )


def _abort(message: pb.HandoffMessage) -> Abort:
    abort = message.abort
    return Abort(key_from_wire(abort.key), abort.reason, _ERROR_KINDS.get(abort.kind))


_ERROR_KINDS = {kind.value: kind for kind in ErrorKind}

_READERS: dict[str, Callable[[pb.HandoffMessage], SessionMessage]] = {
    "hello": _hello,
    "prefill": _prefill,
    "kv_offer": _kv_offer,
    "ready": _ready,
    "grant": lambda m: Grant(key_from_wire(m.grant.key), m.grant.resume_at, m.grant.stream),
    "busy": lambda m: Busy(key_from_wire(m.busy.key)),
    "first_token": _first_token,
    "complete": _complete,
    "received": lambda m: Received(key_from_wire(m.received.key)),
    "closed": lambda m: Closed(key_from_wire(m.closed.key)),
    "abort": _abort,
    "aborted": lambda m: Aborted(key_from_wire(m.aborted.key)),
    "link_rendezvous": _rendezvous,
    "link_signal": _signal,
    "link_down": lambda m: LinkDown(m.link_down.link_generation, m.link_down.reason),
}
