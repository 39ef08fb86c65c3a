"""Finds the calls of tools in the text of an answer, as it comes, wherever its pieces are cut.

Formats, and what each parser shows of a call: its name as soon as that is known, then its
arguments piece by piece.

* Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` among other text.
* Llama 3: the answer is `{"name": ..., "parameters": {...}}`, several of them parted by `;`.
* Answers that had to be calls: a JSON list of such objects, or the arguments alone.

What looks like a call and has no name is shown as text. Arguments are shown as the model wrote
them, so that an answer cut short has arguments that are cut short.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from router.api.openai_requests import Calling
from router.chat_template import ToolFormat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.api.openai_requests import ToolUse

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENT_KEYS = ("arguments", "parameters")

_SPACE_HELD_MAX = 256
"""White space before a call is part of the format; more than this is part of the answer. So a model
that writes nothing else is not looked at from its beginning at every character."""


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """The beginning of a call, which has an id and a name, or more of its arguments."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What is new of an answer."""

    text: str = ""
    deltas: tuple[ToolDelta, ...] = ()


class ToolParser(Protocol):
    """Of one answer."""

    def push(self, text: str) -> Parsed:
        """Take more of the answer."""
        ...

    def flush(self) -> Parsed:
        """What was held back, now that no more comes."""
        ...


def new_tool_parser(use: ToolUse, tool_format: ToolFormat | None) -> ToolParser | None:
    """None: the answer is text. `tool_format` is how the model calls if it chooses to."""
    match use.calling, tool_format:
        case (Calling.TEXT, _) | (Calling.AUTO, None):
            return None
        case Calling.NAMED, _:
            return ArgumentsParser(use.name)
        case Calling.REQUIRED, _:
            return JsonCallParser(_Calls(use.is_parallel), separators="[],")
        case _, ToolFormat.LLAMA_JSON:
            return JsonCallParser(_Calls(use.is_parallel), separators=";")
        case _:
            return TaggedCallParser(_Calls(use.is_parallel))


class CallScanner:
    """Reads one JSON object with a name and arguments, one character at a time."""

    def __init__(self) -> None:
        self.raw = ""
        """What was read before there was a name."""
        self.name = ""
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key: str | None = None
        """Of the member whose value is being read; None while a key is."""
        self._member = ""
        """The raw text of the key or value being read; of arguments that are shown, its begin."""
        self._arguments = ""
        """Read, and not taken."""
        self._has_arguments = False

    def push(self, character: str) -> None:
        """Take the next character; the first one is the opening brace."""
        assert not self.is_done, "the object has ended"
        if not self.name:
            self.raw += character
        if self._in_string:
            self._push_in_string(character)
        else:
            self._push_between(character)

    def take_arguments(self) -> str:
        """What is new of the arguments; nothing before the name is known."""
        if not self.name:
            return ""
        taken, self._arguments = self._arguments, ""
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        return taken

    def _push_in_string(self, character: str) -> None:
        self._add(character)
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False

    def _push_between(self, character: str) -> None:
        if character in "}]":
            self._depth -= 1
        if self._depth == 0 and character in "}]":
            self._end_member()
            self.is_done = True
        elif self._depth == 1 and character == ":" and self._key is None:
            self._key, self._member = _decoded(self._member), ""
        elif self._depth == 1 and character == ",":
            self._end_member()
        elif self._depth > 1 or (self._depth == 1 and not character.isspace()):
            self._add(character)
        if character in "{[":
            self._depth += 1
        self._in_string = character == '"'

    def _add(self, character: str) -> None:
        # A string may hold the arguments' JSON; it is shown when it can be decoded.
        if self._key in _ARGUMENT_KEYS and (self._member or character)[0] != '"':
            self._has_arguments = True
            self._arguments += character
            self._member = self._member or character
        else:
            self._member += character

    def _end_member(self) -> None:
        key, member = self._key, self._member
        self._key, self._member = None, ""
        if key == "name":
            self.name = _decoded(member)
        elif key in _ARGUMENT_KEYS and member.startswith('"'):
            self._has_arguments = True
            self._arguments += _decoded(member)


def _decoded(member: str) -> str:
    """The text of a JSON string; "" of what is none."""
    try:
        value = json.loads(member)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


class _Calls:
    """The calls of one answer: numbers them, gives them ids, drops what is too many."""

    def __init__(self, is_parallel: bool) -> None:
        self._is_parallel = is_parallel
        self._begun = 0
        self._scanner: CallScanner | None = None
        self._is_shown = False
        """Whether the call being read has begun to be shown."""

    @property
    def is_reading(self) -> bool:
        """Whether an object has begun and not ended."""
        return self._scanner is not None

    @property
    def any_begun(self) -> bool:
        """Whether any call was found."""
        return self._begun > 0

    def begin(self) -> None:
        """An object begins with the next character."""
        assert self._scanner is None, "objects of calls do not nest"
        self._scanner, self._is_shown = CallScanner(), False

    def push(self, character: str) -> Parsed:
        """The next character of the object; its text when it turns out to be no call."""
        scanner = self._scanner
        assert scanner is not None, "some object has begun"
        scanner.push(character)
        deltas = self._new_deltas(scanner)
        if scanner.is_done:
            self._scanner = None
            if not scanner.name:
                return Parsed(scanner.raw, deltas)
        return Parsed("", deltas)

    def flush(self) -> str:
        """The text of an object that was cut short before its name was known."""
        scanner, self._scanner = self._scanner, None
        return "" if scanner is None or scanner.name else scanner.raw

    def _new_deltas(self, scanner: CallScanner) -> tuple[ToolDelta, ...]:
        deltas = []
        if scanner.name and not self._is_shown:
            self._is_shown = True
            self._begun += 1
            index = self._begun - 1
            deltas.append(ToolDelta(index, "", f"call_{os.urandom(12).hex()}", scanner.name))
        arguments = scanner.take_arguments()
        if arguments:
            deltas.append(ToolDelta(self._begun - 1, arguments))
        return tuple(deltas) if self._is_parallel or self._begun <= 1 else ()


class TaggedCallParser:
    """Hermes' and Qwen's format."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._is_inside = False
        """Whether between an opening tag and its closing one."""
        self._text = ""
        """Not shown: may become a tag, or be white space around one."""

    def push(self, text: str) -> Parsed:
        """Take more of the answer."""
        return _joined(self._push_character(character) for character in text)

    def flush(self) -> Parsed:
        """A tag that was never completed is text."""
        held, self._text = self._text + self._calls.flush(), ""
        is_format = (self._is_inside or self._calls.any_begun) and not held.strip()
        return Parsed("" if is_format else held)

    def _push_character(self, character: str) -> Parsed:
        if self._calls.is_reading:
            return self._calls.push(character)
        self._text += character
        return self._inside() if self._is_inside else self._outside()

    def _inside(self) -> Parsed:
        """Between the tags, and outside of the object."""
        if self._text[-1] == "{" and self._text.lstrip() == "{":
            self._text = ""
            self._calls.begin()
            return self._calls.push("{")
        if self._text.endswith(_CLOSE):
            rest = self._text.removesuffix(_CLOSE)
            self._text, self._is_inside = "", False
            return Parsed(rest if rest.strip() else "")
        return Parsed()

    def _outside(self) -> Parsed:
        if self._text.endswith(_OPEN):
            before = self._text.removesuffix(_OPEN)
            self._text, self._is_inside = "", True
            return Parsed(before if before.strip() else "")
        before = self._text[: len(self._text) - _prefix_of_tag(self._text)]
        # White space before a tag is part of the format, not of the answer.
        shown = before if len(before) > _SPACE_HELD_MAX else before.rstrip()
        self._text = self._text[len(shown) :]
        return Parsed(shown)


class JsonCallParser:
    """Objects of calls, with nothing but white space and `separators` between them."""

    def __init__(self, calls: _Calls, separators: str) -> None:
        self._calls = calls
        self._separators = separators
        self._space = ""
        self._is_text = False

    def push(self, text: str) -> Parsed:
        """Take more of the answer."""
        if self._is_text:
            return Parsed(text)
        return _joined(self._push_character(character) for character in text)

    def flush(self) -> Parsed:
        """What was no call after all is text."""
        space = "" if self._calls.any_begun else self._space
        return Parsed(space + self._calls.flush())

    def _push_character(self, character: str) -> Parsed:
        if self._is_text:
            return Parsed(character)
        if self._calls.is_reading:
            found = self._calls.push(character)
            self._is_text = bool(found.text)
            return found
        if character == "{":
            self._space = ""
            self._calls.begin()
            return self._calls.push(character)
        self._space += character
        is_format = character.isspace() or character in self._separators
        if is_format and len(self._space) <= _SPACE_HELD_MAX:
            return Parsed()
        self._is_text, shown = True, self._space
        self._space = ""
        return Parsed(shown)


class ArgumentsParser:
    """The whole answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_begun = False

    def push(self, text: str) -> Parsed:
        """Take more of the answer."""
        if not text:
            return Parsed()
        deltas: tuple[ToolDelta, ...] = (ToolDelta(0, text),)
        if not self._is_begun:
            self._is_begun = True
            deltas = (ToolDelta(0, "", f"call_{os.urandom(12).hex()}", self._name), *deltas)
        return Parsed("", deltas)

    def flush(self) -> Parsed:
        """Nothing is held back."""
        return Parsed()


def _prefix_of_tag(text: str) -> int:
    """How many characters at the end of `text` may begin an opening tag."""
    longest = min(len(text), len(_OPEN) - 1)
    return next((n for n in range(longest, 0, -1) if _OPEN.startswith(text[-n:])), 0)


def _joined(parts: Iterable[Parsed]) -> Parsed:
    """Several steps as one, with pieces of the same call's arguments joined."""
    text = ""
    deltas: list[ToolDelta] = []
    for part in parts:
        text += part.text
        for delta in part.deltas:
            last = deltas[-1] if deltas else None
            if last is not None and not delta.id and last.index == delta.index:
                deltas[-1] = replace(last, arguments=last.arguments + delta.arguments)
            else:
                deltas.append(delta)
    return Parsed(text, tuple(deltas))
