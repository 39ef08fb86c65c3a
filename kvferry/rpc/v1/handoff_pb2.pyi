from kvferry.rpc.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffKey(_message.Message):
    __slots__ = ("request_id", "attempt", "source_incarnation", "sink_incarnation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SINK_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    source_incarnation: int
    sink_incarnation: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., source_incarnation: _Optional[int] = ..., sink_incarnation: _Optional[int] = ...) -> None: ...

class HandoffBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[HandoffMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[HandoffMessage, _Mapping]]] = ...) -> None: ...

class HandoffMessage(_message.Message):
    __slots__ = ("hello", "prefill", "ready", "grant", "busy", "first_token", "complete", "received", "closed", "abort", "aborted", "link_rendezvous", "link_signal", "link_down", "kv_offer")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    LINK_RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    LINK_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    LINK_DOWN_FIELD_NUMBER: _ClassVar[int]
    KV_OFFER_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    prefill: Prefill
    ready: Ready
    grant: Grant
    busy: Busy
    first_token: FirstToken
    complete: Complete
    received: Received
    closed: Closed
    abort: Abort
    aborted: Aborted
    link_rendezvous: LinkRendezvous
    link_signal: LinkSignal
    link_down: LinkDown
    kv_offer: KvOffer
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., busy: _Optional[_Union[Busy, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ..., received: _Optional[_Union[Received, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., aborted: _Optional[_Union[Aborted, _Mapping]] = ..., link_rendezvous: _Optional[_Union[LinkRendezvous, _Mapping]] = ..., link_signal: _Optional[_Union[LinkSignal, _Mapping]] = ..., link_down: _Optional[_Union[LinkDown, _Mapping]] = ..., kv_offer: _Optional[_Union[KvOffer, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "layout_hash", "staging_buffer_bytes", "heads", "ranks", "host")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    STAGING_BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    layout_hash: str
    staging_buffer_bytes: int
    heads: int
    ranks: int
    host: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., layout_hash: _Optional[str] = ..., staging_buffer_bytes: _Optional[int] = ..., heads: _Optional[int] = ..., ranks: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("key", "prompt", "sampling", "extra_key", "layout_hash", "sharing", "priority", "held_only", "goes_first", "adapter")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    HELD_ONLY_FIELD_NUMBER: _ClassVar[int]
    GOES_FIRST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    extra_key: str
    layout_hash: str
    sharing: _inference_pb2.Sharing
    priority: int
    held_only: bool
    goes_first: bool
    adapter: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., extra_key: _Optional[str] = ..., layout_hash: _Optional[str] = ..., sharing: _Optional[_Union[_inference_pb2.Sharing, str]] = ..., priority: _Optional[int] = ..., held_only: bool = ..., goes_first: bool = ..., adapter: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("key", "prompt_tokens", "layout_hash", "hit_tokens", "host_hit_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    prompt_tokens: int
    layout_hash: str
    hit_tokens: int
    host_hit_tokens: int
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., layout_hash: _Optional[str] = ..., hit_tokens: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("key", "resume_at", "stream")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RESUME_AT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    resume_at: int
    stream: int
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., resume_at: _Optional[int] = ..., stream: _Optional[int] = ...) -> None: ...

class Busy(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("key", "tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("token_id", "logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _inference_pb2.TokenLogprobs
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ("key", "tokens", "link_generation", "marks")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINK_GENERATION_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    tokens: int
    link_generation: int
    marks: PromptMarks
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., tokens: _Optional[int] = ..., link_generation: _Optional[int] = ..., marks: _Optional[_Union[PromptMarks, _Mapping]] = ...) -> None: ...

class PromptMarks(_message.Message):
    __slots__ = ("scheduled_s", "computed_s", "granted_s", "completed_s")
    SCHEDULED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    GRANTED_S_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_S_FIELD_NUMBER: _ClassVar[int]
    scheduled_s: float
    computed_s: float
    granted_s: float
    completed_s: float
    def __init__(self, scheduled_s: _Optional[float] = ..., computed_s: _Optional[float] = ..., granted_s: _Optional[float] = ..., completed_s: _Optional[float] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("key", "reason", "kind")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    reason: str
    kind: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., reason: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class Aborted(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ...) -> None: ...

class LinkRendezvous(_message.Message):
    __slots__ = ("link_generation", "lane", "store_key", "store_value")
    LINK_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    STORE_KEY_FIELD_NUMBER: _ClassVar[int]
    STORE_VALUE_FIELD_NUMBER: _ClassVar[int]
    link_generation: int
    lane: int
    store_key: str
    store_value: bytes
    def __init__(self, link_generation: _Optional[int] = ..., lane: _Optional[int] = ..., store_key: _Optional[str] = ..., store_value: _Optional[bytes] = ...) -> None: ...

class LinkSignal(_message.Message):
    __slots__ = ("link_generation", "lane", "kind", "value")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[LinkSignal.Kind]
        KIND_CREDIT: _ClassVar[LinkSignal.Kind]
        KIND_SENDING: _ClassVar[LinkSignal.Kind]
    KIND_UNSPECIFIED: LinkSignal.Kind
    KIND_CREDIT: LinkSignal.Kind
    KIND_SENDING: LinkSignal.Kind
    LINK_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    link_generation: int
    lane: int
    kind: LinkSignal.Kind
    value: int
    def __init__(self, link_generation: _Optional[int] = ..., lane: _Optional[int] = ..., kind: _Optional[_Union[LinkSignal.Kind, str]] = ..., value: _Optional[int] = ...) -> None: ...

class LinkDown(_message.Message):
    __slots__ = ("link_generation", "reason")
    LINK_GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    link_generation: int
    reason: str
    def __init__(self, link_generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class KvOffer(_message.Message):
    __slots__ = ("key", "address", "tokens", "extra_key", "sharing", "priority", "adapter")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEY_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    address: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    extra_key: str
    sharing: _inference_pb2.Sharing
    priority: int
    adapter: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., address: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., extra_key: _Optional[str] = ..., sharing: _Optional[_Union[_inference_pb2.Sharing, str]] = ..., priority: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...
