from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_CLASS_STANDARD: _ClassVar[ServiceClass]
    SERVICE_CLASS_INTERACTIVE: _ClassVar[ServiceClass]
    SERVICE_CLASS_BATCH: _ClassVar[ServiceClass]

class Sharing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHARING_SHARED: _ClassVar[Sharing]
    SHARING_RECOMPUTED: _ClassVar[Sharing]
    SHARING_PRIVATE: _ClassVar[Sharing]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
SERVICE_CLASS_STANDARD: ServiceClass
SERVICE_CLASS_INTERACTIVE: ServiceClass
SERVICE_CLASS_BATCH: ServiceClass
SHARING_SHARED: Sharing
SHARING_RECOMPUTED: Sharing
SHARING_PRIVATE: Sharing
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools", "template_options")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    template_options: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., template_options: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "sampling", "cache_salt", "sharing", "priority", "service_class", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: SamplingParams
    cache_salt: str
    sharing: Sharing
    priority: int
    service_class: ServiceClass
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., sharing: _Optional[_Union[Sharing, str]] = ..., priority: _Optional[int] = ..., service_class: _Optional[_Union[ServiceClass, str]] = ..., tenant: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "n", "json_schema", "regex", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    n: int
    json_schema: str
    regex: str
    grammar: str
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "logprobs", "finish", "index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish: Finish
    index: int
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop_string", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    usage: Usage
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "prefill_hit_tokens", "decode_hit_tokens", "moved_tokens", "moved_bytes", "handoff_ms", "ttft_ms", "itl_ms", "prefill_worker", "decode_worker", "attempt", "host_hit_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    ITL_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    prefill_hit_tokens: int
    decode_hit_tokens: int
    moved_tokens: int
    moved_bytes: int
    handoff_ms: float
    ttft_ms: float
    itl_ms: float
    prefill_worker: str
    decode_worker: str
    attempt: int
    host_hit_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., prefill_hit_tokens: _Optional[int] = ..., decode_hit_tokens: _Optional[int] = ..., moved_tokens: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., handoff_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., itl_ms: _Optional[float] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., attempt: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class ModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfoResponse(_message.Message):
    __slots__ = ("model", "vocab_size", "context_length", "eos_token_ids", "page_size", "dtype", "chat_template", "adapters")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    vocab_size: int
    context_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    page_size: int
    dtype: str
    chat_template: bool
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., page_size: _Optional[int] = ..., dtype: _Optional[str] = ..., chat_template: bool = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class ClusterStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterStatusResponse(_message.Message):
    __slots__ = ("membership_version", "workers", "requests_in_flight")
    MEMBERSHIP_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    membership_version: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerSummary]
    requests_in_flight: int
    def __init__(self, membership_version: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerSummary, _Mapping]]] = ..., requests_in_flight: _Optional[int] = ...) -> None: ...

class WorkerSummary(_message.Message):
    __slots__ = ("worker_id", "role", "incarnation", "address", "reachable", "load", "accounts", "pid", "indexed_blocks", "host_accounts", "counters", "kv_index", "draining")
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
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INDEXED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    KV_INDEX_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    incarnation: int
    address: str
    reachable: bool
    load: WorkerLoad
    accounts: KvAccounts
    pid: int
    indexed_blocks: int
    host_accounts: HostAccounts
    counters: _containers.ScalarMap[str, int]
    kv_index: KvIndex
    draining: bool
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., reachable: bool = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., accounts: _Optional[_Union[KvAccounts, _Mapping]] = ..., pid: _Optional[int] = ..., indexed_blocks: _Optional[int] = ..., host_accounts: _Optional[_Union[HostAccounts, _Mapping]] = ..., counters: _Optional[_Mapping[str, int]] = ..., kv_index: _Optional[_Union[KvIndex, _Mapping]] = ..., draining: bool = ...) -> None: ...

class KvIndex(_message.Message):
    __slots__ = ("known_to", "full", "silence_s")
    KNOWN_TO_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    SILENCE_S_FIELD_NUMBER: _ClassVar[int]
    known_to: int
    full: bool
    silence_s: float
    def __init__(self, known_to: _Optional[int] = ..., full: bool = ..., silence_s: _Optional[float] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "waiting_tokens", "handoffs", "prefill_tokens_per_s", "link_bytes_per_s")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_tokens: int
    handoffs: int
    prefill_tokens_per_s: float
    link_bytes_per_s: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., handoffs: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., link_bytes_per_s: _Optional[float] = ...) -> None: ...

class KvAccounts(_message.Message):
    __slots__ = ("free", "evictable", "protected", "private", "inbound", "total", "outbound_pinned", "rows_live", "rows_total", "loading")
    FREE_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    INBOUND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OUTBOUND_PINNED_FIELD_NUMBER: _ClassVar[int]
    ROWS_LIVE_FIELD_NUMBER: _ClassVar[int]
    ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    free: int
    evictable: int
    protected: int
    private: int
    inbound: int
    total: int
    outbound_pinned: int
    rows_live: int
    rows_total: int
    loading: int
    def __init__(self, free: _Optional[int] = ..., evictable: _Optional[int] = ..., protected: _Optional[int] = ..., private: _Optional[int] = ..., inbound: _Optional[int] = ..., total: _Optional[int] = ..., outbound_pinned: _Optional[int] = ..., rows_live: _Optional[int] = ..., rows_total: _Optional[int] = ..., loading: _Optional[int] = ...) -> None: ...

class HostAccounts(_message.Message):
    __slots__ = ("free", "evictable", "protected", "writing", "loading", "total")
    FREE_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_FIELD_NUMBER: _ClassVar[int]
    WRITING_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    free: int
    evictable: int
    protected: int
    writing: int
    loading: int
    total: int
    def __init__(self, free: _Optional[int] = ..., evictable: _Optional[int] = ..., protected: _Optional[int] = ..., writing: _Optional[int] = ..., loading: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class AddWorkerRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class AddWorkerResponse(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "drain_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    drain_s: float
    def __init__(self, worker_id: _Optional[str] = ..., drain_s: _Optional[float] = ...) -> None: ...

class RemoveWorkerResponse(_message.Message):
    __slots__ = ("drained",)
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    def __init__(self, drained: bool = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("role", "count", "drain_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    count: int
    drain_s: float
    def __init__(self, role: _Optional[str] = ..., count: _Optional[int] = ..., drain_s: _Optional[float] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("added", "draining")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    added: _containers.RepeatedScalarFieldContainer[str]
    draining: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, added: _Optional[_Iterable[str]] = ..., draining: _Optional[_Iterable[str]] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("config", "drain_s")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    config: str
    drain_s: float
    def __init__(self, config: _Optional[str] = ..., drain_s: _Optional[float] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("worker_ids", "drain_s")
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    drain_s: float
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ..., drain_s: _Optional[float] = ...) -> None: ...

class RolloutRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutStatus(_message.Message):
    __slots__ = ("phase", "revision", "replaced", "to_replace", "detail", "changes")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    TO_REPLACE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    phase: str
    revision: int
    replaced: int
    to_replace: int
    detail: str
    changes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, phase: _Optional[str] = ..., revision: _Optional[int] = ..., replaced: _Optional[int] = ..., to_replace: _Optional[int] = ..., detail: _Optional[str] = ..., changes: _Optional[_Iterable[str]] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("audits",)
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    audits: _containers.RepeatedCompositeFieldContainer[WorkerAudit]
    def __init__(self, audits: _Optional[_Iterable[_Union[WorkerAudit, _Mapping]]] = ...) -> None: ...

class WorkerAudit(_message.Message):
    __slots__ = ("worker_id", "report", "failure")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    report: AuditReport
    failure: str
    def __init__(self, worker_id: _Optional[str] = ..., report: _Optional[_Union[AuditReport, _Mapping]] = ..., failure: _Optional[str] = ...) -> None: ...

class AuditReport(_message.Message):
    __slots__ = ("violations", "accounts", "host_accounts", "duration_ms", "engine_steps")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STEPS_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    accounts: KvAccounts
    host_accounts: HostAccounts
    duration_ms: float
    engine_steps: int
    def __init__(self, violations: _Optional[_Iterable[str]] = ..., accounts: _Optional[_Union[KvAccounts, _Mapping]] = ..., host_accounts: _Optional[_Union[HostAccounts, _Mapping]] = ..., duration_ms: _Optional[float] = ..., engine_steps: _Optional[int] = ...) -> None: ...

class TracesRequest(_message.Message):
    __slots__ = ("name", "count_max")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    name: str
    count_max: int
    def __init__(self, name: _Optional[str] = ..., count_max: _Optional[int] = ...) -> None: ...

class TracesResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestTrace]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestTrace, _Mapping]]] = ...) -> None: ...

class RequestTrace(_message.Message):
    __slots__ = ("request_id", "trace_id", "arrived_unix_s", "outcome", "duration_s", "span")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    trace_id: str
    arrived_unix_s: float
    outcome: str
    duration_s: float
    span: TraceSpan
    def __init__(self, request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., arrived_unix_s: _Optional[float] = ..., outcome: _Optional[str] = ..., duration_s: _Optional[float] = ..., span: _Optional[_Union[TraceSpan, _Mapping]] = ...) -> None: ...

class TraceSpan(_message.Message):
    __slots__ = ("name", "place", "start_s", "end_s", "error", "error_kind", "attributes", "children")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_KIND_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    name: str
    place: str
    start_s: float
    end_s: float
    error: str
    error_kind: str
    attributes: _containers.ScalarMap[str, str]
    children: _containers.RepeatedCompositeFieldContainer[TraceSpan]
    def __init__(self, name: _Optional[str] = ..., place: _Optional[str] = ..., start_s: _Optional[float] = ..., end_s: _Optional[float] = ..., error: _Optional[str] = ..., error_kind: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ..., children: _Optional[_Iterable[_Union[TraceSpan, _Mapping]]] = ...) -> None: ...

class PlansRequest(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class PlansResponse(_message.Message):
    __slots__ = ("mode", "plans")
    MODE_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    plans: _containers.RepeatedCompositeFieldContainer[Plan]
    def __init__(self, mode: _Optional[str] = ..., plans: _Optional[_Iterable[_Union[Plan, _Mapping]]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("age_s", "verdict", "steps", "figures")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    verdict: str
    steps: _containers.RepeatedCompositeFieldContainer[PlannedStep]
    figures: PlanFigures
    def __init__(self, age_s: _Optional[float] = ..., verdict: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[PlannedStep, _Mapping]]] = ..., figures: _Optional[_Union[PlanFigures, _Mapping]] = ...) -> None: ...

class PlannedStep(_message.Message):
    __slots__ = ("kind", "worker_id", "role", "reason", "outcome")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    kind: str
    worker_id: str
    role: str
    reason: str
    outcome: str
    def __init__(self, kind: _Optional[str] = ..., worker_id: _Optional[str] = ..., role: _Optional[str] = ..., reason: _Optional[str] = ..., outcome: _Optional[str] = ...) -> None: ...

class PlanFigures(_message.Message):
    __slots__ = ("prompt_tokens_per_s", "prompt_tokens", "backlog_tokens", "answer_tokens_per_s", "answer_tokens", "sequences", "prefill_tokens_per_s", "sequences_max", "now", "best")
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_MAX_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens_per_s: float
    prompt_tokens: float
    backlog_tokens: float
    answer_tokens_per_s: float
    answer_tokens: float
    sequences: float
    prefill_tokens_per_s: float
    sequences_max: float
    now: SplitLoad
    best: SplitLoad
    def __init__(self, prompt_tokens_per_s: _Optional[float] = ..., prompt_tokens: _Optional[float] = ..., backlog_tokens: _Optional[float] = ..., answer_tokens_per_s: _Optional[float] = ..., answer_tokens: _Optional[float] = ..., sequences: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., sequences_max: _Optional[float] = ..., now: _Optional[_Union[SplitLoad, _Mapping]] = ..., best: _Optional[_Union[SplitLoad, _Mapping]] = ...) -> None: ...

class SplitLoad(_message.Message):
    __slots__ = ("prefill", "decode", "prompt_load", "answer_load")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOAD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_LOAD_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    prompt_load: float
    answer_load: float
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., prompt_load: _Optional[float] = ..., answer_load: _Optional[float] = ...) -> None: ...
