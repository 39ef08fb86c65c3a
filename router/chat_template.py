"""A model's chat template: a conversation to the text that the model was trained on.

Templates come with a model and may be hostile, so they run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.request import ChatMessage, Tool

_SET_HERE = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
)
"""Variables of a template that say what the conversation is. None of them is a client's to set."""

_FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""What a template raises at a conversation that its author had not thought of."""


class ToolFormat(Enum):
    """How a model writes that it calls a tool; see `router.api.tool_calls`."""

    HERMES = "hermes"
    LLAMA_JSON = "llama_json"


class _RefusedByTemplate(TemplateError):
    """The template itself said no, for instance to a role out of turn."""


class ChatTemplate:
    """A compiled template. Raises `ConfigError` naming `model.path` when it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the names templates use: `bos_token`, `eos_token`..."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ConfigError("model.path", f"the chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._options = names - _SET_HERE - self._special_tokens.keys() - environment.globals.keys()
        """Variables that change how the conversation is shown, such as `enable_thinking`."""
        self.has_tools = "tools" in names
        """Whether it tells the model which tools there are."""
        self.tool_format = _tool_format(source) if self.has_tools else None
        """How the model then calls them; None if that is not known."""
        self._knows_calls = "tool_calls" in source

    def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), options: str = ""
    ) -> str:
        """The conversation up to where the assistant is to speak.

        `options`: a JSON object of variables of the template; what it does not know is ignored.
        Raises `InvalidInput` naming `chat.messages` when the template refuses the conversation,
        and the field of `chat` that is not JSON or that the template has no place for.
        """
        if tools and not self.has_tools:
            raise InvalidInput("chat.tools", "the chat template of this model has no tools")
        turns = [self._turn(f"chat.messages[{i}]", each) for i, each in enumerate(messages)]
        offered = [_tool(f"chat.tools[{i}].parameters", each) for i, each in enumerate(tools)]
        variables: dict[str, Any] = {**self._special_tokens, "messages": turns}
        if offered:
            variables["tools"] = offered
        variables |= self._chosen(options)
        try:
            return self._template.render(variables, add_generation_prompt=True)
        except _FAILURES as error:
            raise InvalidInput(
                "chat.messages", f"the model's chat template refuses them: {error}"
            ) from error

    def _chosen(self, options: str) -> dict[str, Any]:
        given = _json_object("chat.template_options", options)
        for name in given.keys() & (_SET_HERE | self._special_tokens.keys()):
            raise InvalidInput(f"chat.template_options.{name}", "is not for clients to set")
        return {name: value for name, value in given.items() if name in self._options}

    def _turn(self, name: str, message: ChatMessage) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            if not self._knows_calls:
                problem = "the chat template of this model has no tools"
                raise InvalidInput(f"{name}.tool_calls", problem)
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": _json_object(
                            f"{name}.tool_calls[{i}].function.arguments", call.arguments
                        ),
                    },
                }
                for i, call in enumerate(message.tool_calls)
            ]
        if message.tool_call_id:
            turn["tool_call_id"] = message.tool_call_id
        if message.name:
            turn["name"] = message.name
        return turn


def _tool(name: str, tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    # Templates ask for the parameters' properties without asking whether there are any.
    no_parameters: dict[str, Any] = {"type": "object", "properties": {}}
    function["parameters"] = _json_object(name, tool.parameters) or no_parameters
    return {"type": "function", "function": function}


def _json_object(name: str, text: str) -> dict[str, Any]:
    """Templates are given objects and write them in their own way."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidInput(name, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput(name, "is not a JSON object")
    return value


def _tool_format(source: str) -> ToolFormat | None:
    """Told by what the template shows the model: no model says so in its configuration."""
    if "<tool_call>" in source:
        return ToolFormat.HERMES
    if "python_tag" in source or '"parameters":' in source:
        return ToolFormat.LLAMA_JSON
    return None


def _refuse(message: str) -> NoReturn:
    raise _RefusedByTemplate(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which models have not been trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)
