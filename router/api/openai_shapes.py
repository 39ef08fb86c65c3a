"""The shapes of what the OpenAI API answers. `/openapi.json` is made from them."""

from __future__ import annotations

# Needed at run time too: the description of the API is read off these types.
from typing import Literal, NotRequired

from typing_extensions import TypedDict


class PromptTokensDetails(TypedDict):
    """Where the prompt's KV came from."""

    cached_tokens: int


class UsageOut(TypedDict):
    """What a call cost, all prompts and samples together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(TypedDict):
    """One token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: NotRequired[list[TokenLogprob]]


class ChatLogprobs(TypedDict):
    """Of the tokens of a turn."""

    content: list[TokenLogprob]
    refusal: None


class FunctionOut(TypedDict):
    """`arguments` is JSON, as far as the model kept to it."""

    name: str
    arguments: str


class ToolCallOut(TypedDict):
    """What the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionOut


class ChatMessageOut(TypedDict):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallOut]]


class ChatChoice(TypedDict):
    """One of n answers."""

    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | None


class ChatBodyOut(TypedDict):
    """The answer to POST /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageOut
    service_tier: str | None


class FunctionDelta(TypedDict):
    """More of a call; the name comes with its first piece."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """More of one call."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict, total=False):
    """What is new of a turn."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    """What is new of one of n answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | None]


class ChatChunk(TypedDict):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    service_tier: str | None
    usage: NotRequired[UsageOut | None]


class CompletionLogprobs(TypedDict):
    """Of the tokens of a text, one entry for each."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One of n answers to one of the prompts, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | None


class CompletionBodyOut(TypedDict):
    """The answer to POST /v1/completions, or one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: str | None
    usage: NotRequired[UsageOut | None]


class ModelOut(TypedDict):
    """The served model, or one of its adapters."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: str | None
    """Which model it adapts; null of the model itself."""


class ModelList(TypedDict):
    """All of them, the model first."""

    object: Literal["list"]
    data: list[ModelOut]


class StatusOut(TypedDict):
    """Of a probe."""

    status: Literal["ok"]


class ErrorFields(TypedDict):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every answer that is an error, and of the last event of a failed stream."""

    error: ErrorFields
