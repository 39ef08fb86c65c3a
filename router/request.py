"""What a client asks for and what it gets back, free of any wire format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from kvferry.cache_key import Sharing

if TYPE_CHECKING:
    from kvferry.cache_key import CacheUse
    from kvferry.generation import AttemptUsage, FinishReason, OutputToken
    from kvferry.ids import Attempt, RequestId, TokenIds, WorkerId
    from kvferry.sampling import SamplingParams
    from kvferry.trace_context import TraceContext


@dataclass(frozen=True, slots=True)
class TextInput:
    """A prompt as text; the tokenizer adds its own special tokens."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class TokenInput:
    """A prompt as token ids, taken as it is."""

    token_ids: TokenIds
    """[tokens], int32."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that an assistant asked for."""

    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a turn of role `tool`: which call it answers."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask for."""

    name: str
    description: str = ""
    parameters: str = ""
    """A JSON schema; empty: no parameters."""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation, rendered with the model's chat template."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    template_options: str = ""
    """A JSON object of variables of the template, such as `enable_thinking`; empty: none."""


PromptInput: TypeAlias = TextInput | TokenInput | ChatInput


class ServiceClass(Enum):
    """Who waits how impatiently. Each class has its own queue and its own limits."""

    STANDARD = "standard"
    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, eq=False)
class ClientRequest:
    """A request as it came in; nothing is validated yet."""

    request_id: str
    """Empty: the router chooses one."""
    model: str
    """Or one of its adapters, by name; empty: the served model."""
    input: PromptInput | None
    sampling: SamplingParams
    cache_salt: str = ""
    sharing: Sharing = Sharing.SHARED
    priority: int = 0
    """Of its KV, under the eviction policy of that name."""
    service_class: ServiceClass = ServiceClass.STANDARD
    tenant: str = ""
    """On whose account; empty: everybody who names none."""
    timeout_s: float | None = None
    """Time the client is willing to wait; None leaves it to the router's configuration."""
    trace: TraceContext | None = None
    """The client's span, if it named one."""


@dataclass(frozen=True, slots=True, eq=False)
class ValidRequest:
    """A request that can be served: ids in range, everything fits into the context."""

    request_id: RequestId
    prompt: TokenIds
    """[prompt_tokens], int32, at least one, fewer than the context length."""
    sampling: SamplingParams
    cache_use: CacheUse


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost, with all its samples, and where its KV came from."""

    prompt_tokens: int
    completion_tokens: int
    attempt: Attempt
    """The attempt that completed."""
    decode_worker: WorkerId | None
    prefill_worker: WorkerId | None
    """None: the decode worker computed the prompt, or nothing was computed."""
    kv: AttemptUsage
    ttft_ms: float
    """From the arrival of the request to its first token; 0 without any token."""
    itl_ms: float
    """Mean time between two tokens of a sample; 0 if none has two."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody had to compute. An attempt that goes on with an answer may find
        more than the prompt in a cache."""
        return min(self.prompt_tokens, self.kv.prefill_hit_tokens + self.kv.host_hit_tokens)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sample ended."""

    reason: FinishReason
    usage: Usage | None
    """Of the whole request; None while other samples go on."""
    stop_string: str = ""
    """The stop string that ended the text, if one did."""


@dataclass(frozen=True, slots=True)
class ResponseChunk:
    """What is new of one sample. Text may lag behind tokens, never the other way."""

    request_id: RequestId
    text: str
    tokens: tuple[OutputToken, ...]
    finish: Finish | None = None
    index: int = 0
    """Which sample."""
