"""What the bodies of the OpenAI API may hold, as models that read JSON and describe themselves.

A field unknown here is ignored, as OpenAI-compatible servers do: new clients send new hints. A
field that would change the answer and is not supported may hold only what changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from kvferry.limits import (
    CACHE_PRIORITY_MAX,
    CACHE_SALT_CHARACTERS_MAX,
    CHAT_MESSAGES_MAX,
    LOGIT_BIAS_ENTRIES_MAX,
    LOGPROBS_MAX,
    SAMPLES_MAX,
    STOP_STRING_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
)

TAG_MARK = "#"
"""Begins the name of an alternative, which stands in the path of an error but is no field."""

PROMPTS_MAX = 128
"""Of one request. Each is a request of its own to the cluster."""

TOOLS_MAX = 128
"""As OpenAI."""

_STRING = "#string"
_LIST = "#list"
_OBJECT = "#object"


def _list_or_string(value: Any) -> str:
    return _LIST if isinstance(value, list) else _STRING


def _object_or_string(value: Any) -> str:
    return _STRING if isinstance(value, str) else _OBJECT


_TEXT, _TEXTS, _IDS, _ID_LISTS = "#text", "#texts", "#ids", "#id-lists"


def _prompt_kind(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return _TEXTS if isinstance(value, list) else _TEXT
    if isinstance(value[0], list):
        return _ID_LISTS
    return _TEXTS if isinstance(value[0], str) else _IDS


def _few_biases(value: Any) -> Any:
    # Before a million entries are looked at one by one.
    if isinstance(value, dict) and len(value) > LOGIT_BIAS_ENTRIES_MAX:
        problem = f"has {len(value)} entries; at most {LOGIT_BIAS_ENTRIES_MAX}"
        raise PydanticCustomError("too_long", problem)
    return value


_FIRST_ERROR = Field(fail_fast=True)
"""Of lists: who sends a million wrong elements is told of one, and costs what one costs."""


class Body(BaseModel):
    """Types are exact: a number in quotes is not a number."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


_TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIds: TypeAlias = Annotated[list[_TokenId], _FIRST_ERROR]
_Prompt: TypeAlias = Annotated[
    Annotated[str, Tag(_TEXT)]
    | Annotated[list[str], Field(min_length=1, max_length=PROMPTS_MAX), _FIRST_ERROR, Tag(_TEXTS)]
    | Annotated[_TokenIds, Tag(_IDS)]
    | Annotated[list[_TokenIds], Field(max_length=PROMPTS_MAX), _FIRST_ERROR, Tag(_ID_LISTS)],
    Discriminator(_prompt_kind),
]
_StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=STOP_STRING_CHARACTERS_MAX)]
_Stop: TypeAlias = Annotated[
    Annotated[_StopString, Tag(_STRING)]
    | Annotated[list[_StopString], Field(max_length=STOP_STRINGS_MAX), _FIRST_ERROR, Tag(_LIST)],
    Discriminator(_list_or_string),
]
_JsonSchema: TypeAlias = Annotated[
    Annotated[str, Tag(_STRING)] | Annotated[dict[str, Any], Tag(_OBJECT)],
    Discriminator(_object_or_string),
]
_Choices: TypeAlias = Annotated[list[str], Field(min_length=1), _FIRST_ERROR]


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool | None = None


class StructuredOutputs(Body):
    """Which language the answer is of; at most one."""

    json_: _JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: None = None


class NamedSchema(Body):
    """The schema that the answer keeps to."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """What kind of text the answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=SAMPLES_MAX)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern="^[0-9]{1,9}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=LOGIT_BIAS_ENTRIES_MAX),
            BeforeValidator(_few_biases),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: _Stop | None = None
    stop_token_ids: Annotated[_TokenIds, Field(max_length=STOP_TOKEN_IDS_MAX)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _JsonSchema | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: _Choices | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    cache_salt: Annotated[str, Field(max_length=CACHE_SALT_CHARACTERS_MAX)] | None = None
    sharing: Literal["shared", "recomputed", "private"] | None = None
    priority: Annotated[int, Field(ge=-CACHE_PRIORITY_MAX, le=CACHE_PRIORITY_MAX)] | None = None

    # Not supported, and would change the answer.
    echo: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    prompt_logprobs: None = None
    skip_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    return_token_ids: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    bad_words: Annotated[list[str], Field(max_length=0), _FIRST_ERROR] | None = None


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: _Prompt
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None

    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class FunctionCall(Body):
    """What an assistant asked a function for. `arguments` is JSON."""

    name: str
    arguments: str


class MessageToolCall(Body):
    """One call in the turn of an assistant."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Body):
    """A part of a turn."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag(_STRING)] | Annotated[list[TextPart], _FIRST_ERROR, Tag(_LIST)],
            Discriminator(_list_or_string),
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], _FIRST_ERROR] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    audio: None = None


class FunctionDefinition(Body):
    """A function that the model may ask for."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(Body):
    """Tools are functions."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=CHAT_MESSAGES_MAX), _FIRST_ERROR
    ]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    tools: Annotated[list[ToolBody], Field(max_length=TOOLS_MAX), _FIRST_ERROR] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag(_STRING)]
            | Annotated[NamedTool, Tag(_OBJECT)],
            Discriminator(_object_or_string),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    functions: None = None
    function_call: None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: None = None
    web_search_options: None = None
    chat_template: None = None
    documents: None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None


NOT_SUPPORTED = frozenset(
    (
        *("echo", "use_beam_search", "prompt_logprobs", "skip_special_tokens"),
        *("include_stop_str_in_output", "return_token_ids", "return_tokens_as_token_ids"),
        *("bad_words", "best_of", "suffix", "function_call", "functions", "modalities", "audio"),
        *("web_search_options", "chat_template", "documents"),
        *("add_generation_prompt", "continue_final_message", "structural_tag"),
    )
)
"""Fields that only accept what changes nothing."""
