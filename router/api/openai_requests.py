"""Bodies of the OpenAI API to the router's requests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import ValidationError

from kvferry.cache_key import Sharing
from kvferry.errors import InvalidInput
from kvferry.sampling import Constraint, ConstraintKind, SamplingParams
from router.api.http_errors import FieldNames
from router.api.openai_body import NOT_SUPPORTED, TAG_MARK, Body
from router.api.security import TENANT_HEADER
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
    from collections.abc import Mapping

    from kvferry.trace_context import TraceContext
    from router.api.openai_body import ChatBody, CompletionBody, GenerationBody, Message, ToolBody
    from router.request import PromptInput

TIMEOUT_HEADER = "x-kvferry-timeout-s"
REQUEST_ID_HEADER = "x-request-id"

_BodyT = TypeVar("_BodyT", bound=Body)

_COMPLETION_TOKENS = 16
"""OpenAI's default for completions. A chat may use all that the context leaves."""
_UNBOUNDED_TOKENS = 2**31 - 1

_SERVICE_CLASSES = {
    None: ServiceClass.STANDARD,
    "auto": ServiceClass.STANDARD,
    "default": ServiceClass.STANDARD,
    "flex": ServiceClass.BATCH,
    "priority": ServiceClass.INTERACTIVE,
}
_ANY_OBJECT = '{"type":"object"}'

_NAMES = {
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.template_options": "chat_template_kwargs",
    "input": "prompt",
    "text": "prompt",
    "token_ids": "prompt",
    "tenant": TENANT_HEADER,
    "request_id": REQUEST_ID_HEADER,
    "service_class": "service_tier",
}


class Calling(Enum):
    """What the answer may be with regard to tools."""

    TEXT = "text"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How calls are to be found in the answer."""

    calling: Calling = Calling.TEXT
    name: str = ""
    """Of the function that must be called, under `NAMED`."""
    is_parallel: bool = True
    """False: no call beyond the first."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known of a client beside its body."""

    request_id: str
    tenant: str
    timeout_s: float | None
    seed: int
    """Used where the body has none."""
    trace: TraceContext | None = None
    """Its span, if it named one."""


@dataclass(frozen=True, slots=True)
class Question:
    """One call of the API: a request to the router for each of its prompts."""

    id: str
    requests: tuple[ClientRequest, ...]
    field_names: Mapping[str, str]
    """The body's names of fields that the router knows by another."""
    samples: int
    """Per prompt."""
    is_stream: bool
    include_usage: bool
    service_tier: str | None
    has_logprobs: bool = False
    tool_use: ToolUse = field(default_factory=ToolUse)

    def names_of(self, prompt: int) -> FieldNames:
        """For errors about one of the requests."""
        if len(self.requests) == 1:
            return FieldNames(self.field_names)
        name = f"prompt[{prompt}]"
        return FieldNames({**self.field_names, "text": name, "token_ids": name})


def read_body(kind: type[_BodyT], data: bytes) -> _BodyT:
    """The body in `data`. Raises `InvalidInput` naming the first field that is wrong."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _explain(first) from error


def completion_question(body: CompletionBody, caller: Caller) -> Question:
    """Raises `InvalidInput`."""
    sampling, names = _sampling(body, caller.seed, body.max_tokens or _COMPLETION_TOKENS, "")
    sampling["logprobs"] = body.logprobs
    prompts = _prompts(body.prompt)
    return _question(body, caller, prompts, SamplingParams(**sampling), names)


def chat_question(body: ChatBody, caller: Caller) -> Question:
    """Raises `InvalidInput`."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs", "needs logprobs to be true")
    tool_use = _tool_use(body)
    limit = body.max_completion_tokens or body.max_tokens or _UNBOUNDED_TOKENS
    tools_field = "" if tool_use.calling in (Calling.TEXT, Calling.AUTO) else "tool_choice"
    sampling, names = _sampling(body, caller.seed, limit, tools_field)
    if body.max_completion_tokens is not None:
        names["sampling.max_tokens"] = "max_completion_tokens"
    if tools_field:
        sampling["constraint"] = _call_constraint(body, tool_use)
    sampling["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    names["sampling.logprobs"] = "top_logprobs"
    messages = tuple(_message(f"messages[{i}]", each) for i, each in enumerate(body.messages))
    # A model that may not call has no use for what it could call.
    offered = () if tool_use.calling is Calling.TEXT else tuple(map(_tool, body.tools or ()))
    given = body.chat_template_kwargs
    options = "" if given is None else json.dumps(given, ensure_ascii=False)
    prompts: list[PromptInput] = [ChatInput(messages, offered, options)]
    return _question(body, caller, prompts, SamplingParams(**sampling), names, tool_use)


def _question(
    body: GenerationBody,
    caller: Caller,
    prompts: list[PromptInput],
    sampling: SamplingParams,
    names: dict[str, str],
    tool_use: ToolUse | None = None,
) -> Question:
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options", "needs stream to be true")
    requests = tuple(
        ClientRequest(
            request_id=caller.request_id if len(prompts) == 1 else f"{caller.request_id}-{number}",
            model=body.model or "",
            input=prompt,
            sampling=sampling,
            cache_salt=body.cache_salt or "",
            sharing=Sharing(body.sharing or Sharing.SHARED.value),
            priority=body.priority or 0,
            service_class=_SERVICE_CLASSES[body.service_tier],
            tenant=caller.tenant,
            timeout_s=caller.timeout_s,
            trace=caller.trace,
        )
        for number, prompt in enumerate(prompts)
    )
    options = body.stream_options
    return Question(
        id=caller.request_id,
        requests=requests,
        field_names=_NAMES | names,
        samples=sampling.n,
        is_stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        service_tier=body.service_tier,
        has_logprobs=sampling.logprobs is not None,
        tool_use=tool_use or ToolUse(),
    )


def _sampling(
    body: GenerationBody, seed: int, max_tokens: int, constrained_by: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields of `SamplingParams`, and the client's names of what is called otherwise there.

    `constrained_by`: the field that constrains the answer already, if one does.
    """
    constraint, constraint_field = _constraint(body, constrained_by)
    given = {
        "temperature": body.temperature,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "n": body.n,
        "constraint": constraint,
    }
    sampling: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    stop = body.stop or ()
    sampling |= {
        "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()},
        # Two's complement, so that negative seeds are as good as any.
        "seed": seed if body.seed is None else body.seed % 2**64,
        "max_tokens": max_tokens,
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
    }
    names = {"sampling.constraint": constraint_field} if constraint_field else {}
    for kind in ConstraintKind:
        names[f"sampling.{kind.value}"] = constraint_field or kind.value
    if isinstance(stop, str):
        names["sampling.stop[0]"] = "stop"
    return sampling, names


def _constraint(body: GenerationBody, constrained_by: str) -> tuple[Constraint | None, str]:
    """What the answer is to be a text of, and the field that says so."""
    found = [*_format_constraints(body), *_guided_constraints(body), *_structured(body)]
    fields = ([constrained_by] if constrained_by else []) + [name for name, _ in found]
    if len(fields) > 1:
        raise InvalidInput(fields[1], f"constrains the answer, as {fields[0]} does already")
    if not found:
        return None, constrained_by
    return found[0][1], found[0][0]


def _format_constraints(body: GenerationBody) -> list[tuple[str, Constraint]]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [("response_format", Constraint(ConstraintKind.JSON_SCHEMA, _ANY_OBJECT))]
    if wanted.json_schema is None:
        raise InvalidInput("response_format.json_schema", "is missing")
    return [("response_format.json_schema.schema", _json_schema(wanted.json_schema.schema_))]


def _guided_constraints(body: GenerationBody) -> list[tuple[str, Constraint]]:
    found = []
    if body.guided_json is not None:
        found.append(("guided_json", _json_schema(body.guided_json)))
    if body.guided_regex is not None:
        found.append(("guided_regex", Constraint(ConstraintKind.REGEX, body.guided_regex)))
    if body.guided_grammar is not None:
        found.append(("guided_grammar", Constraint(ConstraintKind.GRAMMAR, body.guided_grammar)))
    if body.guided_choice is not None:
        found.append(("guided_choice", _one_of(body.guided_choice)))
    return found


def _structured(body: GenerationBody) -> list[tuple[str, Constraint]]:
    wanted = body.structured_outputs
    found = []
    if wanted is None:
        return []
    if wanted.json_ is not None:
        found.append(("structured_outputs.json", _json_schema(wanted.json_)))
    if wanted.regex is not None:
        regex = Constraint(ConstraintKind.REGEX, wanted.regex)
        found.append(("structured_outputs.regex", regex))
    if wanted.grammar is not None:
        grammar = Constraint(ConstraintKind.GRAMMAR, wanted.grammar)
        found.append(("structured_outputs.grammar", grammar))
    if wanted.choice is not None:
        found.append(("structured_outputs.choice", _one_of(wanted.choice)))
    if wanted.json_object:
        anything = Constraint(ConstraintKind.JSON_SCHEMA, _ANY_OBJECT)
        found.append(("structured_outputs.json_object", anything))
    return found


def _json_schema(schema: str | dict[str, Any]) -> Constraint:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Constraint(ConstraintKind.JSON_SCHEMA, text)


def _one_of(choices: list[str]) -> Constraint:
    return Constraint(ConstraintKind.REGEX, "|".join(f"({re.escape(each)})" for each in choices))


def _tool_use(body: ChatBody) -> ToolUse:
    choice, tools = body.tool_choice, body.tools or []
    is_parallel = body.parallel_tool_calls is not False
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidInput("tool_choice", "needs tools")
        return ToolUse()
    if choice == "none":
        return ToolUse()
    if choice is None or isinstance(choice, str):
        return ToolUse(Calling(choice or "auto"), is_parallel=is_parallel)
    name = choice.function.name
    if name not in {tool.function.name for tool in tools}:
        raise InvalidInput("tool_choice.function.name", "is none of tools")
    return ToolUse(Calling.NAMED, name)


def _call_constraint(body: ChatBody, tool_use: ToolUse) -> Constraint:
    """For answers that must be calls: their arguments, or a list of calls."""
    parameters = {
        tool.function.name: tool.function.parameters or {"type": "object"}
        for tool in body.tools or ()
    }
    if tool_use.calling is Calling.NAMED:
        return _json_schema(parameters[tool_use.name])
    calls = [
        {
            "type": "object",
            # A name of its own keeps the references of a schema, `#/$defs/...`, within it.
            "properties": {
                "name": {"const": name},
                "parameters": {"$id": f"urn:tool:{number}"} | schema,
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, (name, schema) in enumerate(parameters.items())
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not tool_use.is_parallel:
        schema["maxItems"] = 1
    return _json_schema(schema)


def _prompts(prompt: str | list[Any]) -> list[PromptInput]:
    if isinstance(prompt, str):
        return [TextInput(prompt)]
    if prompt and isinstance(prompt[0], str):
        return [TextInput(text) for text in prompt]
    lists = prompt if prompt and isinstance(prompt[0], list) else [prompt]
    return [TokenInput(np.asarray(ids, dtype=np.int32)) for ids in lists]


def _message(name: str, message: Message) -> ChatMessage:
    calls = tuple(
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    )
    content = message.content
    if content is None and not calls:
        raise InvalidInput(f"{name}.content", "is missing")
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    return ChatMessage(
        # OpenAI's newer name for the system's turn, which no template knows.
        role="system" if message.role == "developer" else message.role,
        content=content or "",
        tool_calls=calls,
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _tool(tool: ToolBody) -> Tool:
    function = tool.function
    parameters = "" if function.parameters is None else json.dumps(function.parameters)
    return Tool(function.name, function.description or "", parameters)


def _explain(error: Mapping[str, Any]) -> InvalidInput:
    path = ""
    for part in error["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(TAG_MARK) and part != "[key]":
            path += f".{part}" if path else part
    if error["type"] == "json_invalid":
        return InvalidInput("body", f"is not JSON: {error['msg']}")
    if error["type"] == "missing":
        return InvalidInput(path, "is missing")
    name = path.rpartition(".")[2].partition("[")[0]
    if name in NOT_SUPPORTED or path.startswith("bad_words"):
        return InvalidInput(path, "is not supported here; leave it out")
    text = error["msg"]
    return InvalidInput(path or "body", f"{text[:1].lower()}{text[1:]}")
