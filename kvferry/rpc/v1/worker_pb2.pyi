from kvferry.rpc.v1 import handoff_pb2 as _handoff_pb2
from kvferry.rpc.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttemptCommands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[AttemptCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[AttemptCommand, _Mapping]]] = ...) -> None: ...

class AttemptCommand(_message.Message):
    __slots__ = ("number", "start", "cancel", "end_sample")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    END_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    number: int
    start: StartAttempt
    cancel: CancelAttempt
    end_sample: EndSample
    def __init__(self, number: _Optional[int] = ..., start: _Optional[_Union[StartAttempt, _Mapping]] = ..., cancel: _Optional[_Union[CancelAttempt, _Mapping]] = ..., end_sample: _Optional[_Union[EndSample, _Mapping]] = ...) -> None: ...

class StartAttempt(_message.Message):
    __slots__ = ("attempt", "timeout_s")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    attempt: AttemptRequest
    timeout_s: float
    def __init__(self, attempt: _Optional[_Union[AttemptRequest, _Mapping]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class CancelAttempt(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndSample(_message.Message):
    __slots__ = ("sample",)
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    sample: int
    def __init__(self, sample: _Optional[int] = ...) -> None: ...

class AttemptEvents(_message.Message):
    __slots__ = ("outputs", "errors", "ended", "token_numbers", "token_samples", "token_ids")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[AttemptOutput]
    errors: _containers.RepeatedCompositeFieldContainer[AttemptError]
    ended: _containers.RepeatedScalarFieldContainer[int]
    token_numbers: _containers.RepeatedScalarFieldContainer[int]
    token_samples: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, outputs: _Optional[_Iterable[_Union[AttemptOutput, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[AttemptError, _Mapping]]] = ..., ended: _Optional[_Iterable[int]] = ..., token_numbers: _Optional[_Iterable[int]] = ..., token_samples: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AttemptError(_message.Message):
    __slots__ = ("number", "kind", "message", "field", "retry_after_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: str
    message: str
    field: str
    retry_after_s: float
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class AttemptRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "incarnation", "prompt", "sampling", "extra_key", "source", "sharing", "priority", "resumed", "goes_first", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    GOES_FIRST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    incarnation: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    extra_key: str
    source: PrefillSource
    sharing: _inference_pb2.Sharing
    priority: int
    resumed: _containers.RepeatedCompositeFieldContainer[SampleProgress]
    goes_first: bool
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., incarnation: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., extra_key: _Optional[str] = ..., source: _Optional[_Union[PrefillSource, _Mapping]] = ..., sharing: _Optional[_Union[_inference_pb2.Sharing, str]] = ..., priority: _Optional[int] = ..., resumed: _Optional[_Iterable[_Union[SampleProgress, _Mapping]]] = ..., goes_first: bool = ..., adapter: _Optional[str] = ...) -> None: ...

class SampleProgress(_message.Message):
    __slots__ = ("token_ids", "ended")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ended: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., ended: bool = ...) -> None: ...

class PrefillSource(_message.Message):
    __slots__ = ("worker_id", "address", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class AttemptOutput(_message.Message):
    __slots__ = ("token_ids", "logprobs", "finish", "usage", "sample", "number", "marks")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    finish: AttemptFinish
    usage: AttemptUsage
    sample: int
    number: int
    marks: AttemptMarks
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[AttemptFinish, _Mapping]] = ..., usage: _Optional[_Union[AttemptUsage, _Mapping]] = ..., sample: _Optional[int] = ..., number: _Optional[int] = ..., marks: _Optional[_Union[AttemptMarks, _Mapping]] = ...) -> None: ...

class AttemptMarks(_message.Message):
    __slots__ = ("fetched_s", "ready_s", "granted_s", "admitted_s", "first_token_s", "adopted_s", "ended_s", "source")
    FETCHED_S_FIELD_NUMBER: _ClassVar[int]
    READY_S_FIELD_NUMBER: _ClassVar[int]
    GRANTED_S_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    fetched_s: float
    ready_s: float
    granted_s: float
    admitted_s: float
    first_token_s: float
    adopted_s: float
    ended_s: float
    source: _handoff_pb2.PromptMarks
    def __init__(self, fetched_s: _Optional[float] = ..., ready_s: _Optional[float] = ..., granted_s: _Optional[float] = ..., admitted_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., adopted_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., source: _Optional[_Union[_handoff_pb2.PromptMarks, _Mapping]] = ...) -> None: ...

class AttemptUsage(_message.Message):
    __slots__ = ("prefill_hit_tokens", "decode_hit_tokens", "moved_tokens", "moved_bytes", "handoff_ms", "host_hit_tokens")
    PREFILL_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_hit_tokens: int
    decode_hit_tokens: int
    moved_tokens: int
    moved_bytes: int
    handoff_ms: float
    host_hit_tokens: int
    def __init__(self, prefill_hit_tokens: _Optional[int] = ..., decode_hit_tokens: _Optional[int] = ..., moved_tokens: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., handoff_ms: _Optional[float] = ..., host_hit_tokens: _Optional[int] = ...) -> None: ...

class AttemptFinish(_message.Message):
    __slots__ = ("reason", "prefill_hit_tokens", "decode_hit_tokens", "moved_tokens", "moved_bytes", "handoff_ms", "host_hit_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: _inference_pb2.FinishReason
    prefill_hit_tokens: int
    decode_hit_tokens: int
    moved_tokens: int
    moved_bytes: int
    handoff_ms: float
    host_hit_tokens: int
    def __init__(self, reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., prefill_hit_tokens: _Optional[int] = ..., decode_hit_tokens: _Optional[int] = ..., moved_tokens: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., handoff_ms: _Optional[float] = ..., host_hit_tokens: _Optional[int] = ...) -> None: ...

class KvEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvEventBatch(_message.Message):
    __slots__ = ("worker_id", "incarnation", "sequence", "snapshot", "events", "expected")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    sequence: int
    snapshot: bool
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    expected: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., snapshot: bool = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ..., expected: _Optional[_Iterable[bytes]] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: AllBlocksCleared
    def __init__(self, stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[AllBlocksCleared, _Mapping]] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class AllBlocksCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatusResponse(_message.Message):
    __slots__ = ("worker_id", "role", "incarnation", "load", "accounts", "pid", "counters", "host_accounts")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    HOST_ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    incarnation: int
    load: _inference_pb2.WorkerLoad
    accounts: _inference_pb2.KvAccounts
    pid: int
    counters: _containers.ScalarMap[str, int]
    host_accounts: _inference_pb2.HostAccounts
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[int] = ..., load: _Optional[_Union[_inference_pb2.WorkerLoad, _Mapping]] = ..., accounts: _Optional[_Union[_inference_pb2.KvAccounts, _Mapping]] = ..., pid: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., host_accounts: _Optional[_Union[_inference_pb2.HostAccounts, _Mapping]] = ...) -> None: ...

class WorkerAuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerAuditResponse(_message.Message):
    __slots__ = ("incarnation", "report")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    report: _inference_pb2.AuditReport
    def __init__(self, incarnation: _Optional[int] = ..., report: _Optional[_Union[_inference_pb2.AuditReport, _Mapping]] = ...) -> None: ...

class WorkerTreeRequest(_message.Message):
    __slots__ = ("nodes_max", "depth_max", "tokens_max", "path")
    NODES_MAX_FIELD_NUMBER: _ClassVar[int]
    DEPTH_MAX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    nodes_max: int
    depth_max: int
    tokens_max: int
    path: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, nodes_max: _Optional[int] = ..., depth_max: _Optional[int] = ..., tokens_max: _Optional[int] = ..., path: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerTreeResponse(_message.Message):
    __slots__ = ("incarnation", "path", "path_tokens", "nodes", "evictable", "protected", "is_whole", "duration_ms")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PATH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    path: _containers.RepeatedScalarFieldContainer[int]
    path_tokens: int
    nodes: _containers.RepeatedCompositeFieldContainer[TreeNode]
    evictable: int
    protected: int
    is_whole: bool
    duration_ms: float
    def __init__(self, incarnation: _Optional[int] = ..., path: _Optional[_Iterable[int]] = ..., path_tokens: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[TreeNode, _Mapping]]] = ..., evictable: _Optional[int] = ..., protected: _Optional[int] = ..., is_whole: bool = ..., duration_ms: _Optional[float] = ...) -> None: ...

class TreeNode(_message.Message):
    __slots__ = ("node_id", "parent_id", "start", "length", "lock_ref", "hits", "last_access", "children", "on_device", "on_host", "priority", "namespace", "tokens")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOCK_REF_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LAST_ACCESS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    ON_HOST_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    parent_id: int
    start: int
    length: int
    lock_ref: int
    hits: int
    last_access: int
    children: int
    on_device: bool
    on_host: bool
    priority: int
    namespace: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node_id: _Optional[int] = ..., parent_id: _Optional[int] = ..., start: _Optional[int] = ..., length: _Optional[int] = ..., lock_ref: _Optional[int] = ..., hits: _Optional[int] = ..., last_access: _Optional[int] = ..., children: _Optional[int] = ..., on_device: bool = ..., on_host: bool = ..., priority: _Optional[int] = ..., namespace: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerHandoffsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerHandoffsResponse(_message.Message):
    __slots__ = ("incarnation", "handoffs")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    handoffs: _containers.RepeatedCompositeFieldContainer[HandoffProgress]
    def __init__(self, incarnation: _Optional[int] = ..., handoffs: _Optional[_Iterable[_Union[HandoffProgress, _Mapping]]] = ...) -> None: ...

class HandoffProgress(_message.Message):
    __slots__ = ("request_id", "attempt", "source_incarnation", "sink_incarnation", "is_source", "state", "age_s", "prompt_tokens", "computed_tokens", "moved_bytes", "total_bytes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SINK_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IS_SOURCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    source_incarnation: int
    sink_incarnation: int
    is_source: bool
    state: str
    age_s: float
    prompt_tokens: int
    computed_tokens: int
    moved_bytes: int
    total_bytes: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., source_incarnation: _Optional[int] = ..., sink_incarnation: _Optional[int] = ..., is_source: bool = ..., state: _Optional[str] = ..., age_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...
