"""A model's chat template: a conversation to the text that the model was trained on.

Templates come with a model and may be hostile, so they run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.request import ChatMessage


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
        except TemplateError as error:
            raise ConfigError("model.path", f"the chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation up to where the assistant is to speak.

        Raises `InvalidInput` naming `chat` when the template refuses the conversation.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=True, **self._special_tokens
            )
        except TemplateError as error:
            raise InvalidInput(
                "chat.messages", f"the model's chat template refuses them: {error}"
            ) from error


def _refuse(message: str) -> NoReturn:
    raise _RefusedByTemplate(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which models have not been trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)
