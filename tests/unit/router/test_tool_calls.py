"""Calls of tools in text, in every format and wherever the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.openai_requests import Calling, ToolUse
from router.api.tool_calls import CallScanner, new_tool_parser
from router.chat_template import ToolFormat

AUTO = ToolUse(Calling.AUTO)
HERMES_TWO = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich } \\" {"}}\n'
    '</tool_call>\n<tool_call>\n{"name":"clock","arguments":{}}</tool_call>'
)
LLAMA_TWO = '{"name": "weather", "parameters": {"city": "Bern"}}; {"name": "clock"}'
TWO = '[{"name": "weather", "parameters": {"city": "Bern"}},\n {"name": "clock", "parameters": {}}]'


def read(use, tool_format, *pieces):
    """The text and the calls, (name, arguments), that the pieces have."""
    parser = new_tool_parser(use, tool_format)
    parsed = [*(parser.push(piece) for piece in pieces), parser.flush()]
    calls = []
    ids = set()
    for delta in (delta for part in parsed for delta in part.deltas):
        if delta.id:
            assert delta.index == len(calls)
            ids.add(delta.id)
            calls.append([delta.name, ""])
        assert delta.index < len(calls), "arguments before the name"
        calls[delta.index][1] += delta.arguments
    assert len(ids) == len(calls)
    return "".join(part.text for part in parsed), [tuple(call) for call in calls]


CASES = {
    "hermes": (
        (AUTO, ToolFormat.HERMES, HERMES_TWO),
        ("Let me look.", [("weather", '{"city": "Zürich } \\" {"}'), ("clock", "{}")]),
    ),
    "hermes, no call": (
        (AUTO, ToolFormat.HERMES, " a < b, <tool_cal and <tool_call"),
        (" a < b, <tool_cal and <tool_call", []),
    ),
    "hermes, no name": (
        (AUTO, ToolFormat.HERMES, '<tool_call>{"city": 1}</tool_call>'),
        ('{"city": 1}', []),
    ),
    "hermes, cut short": (
        (AUTO, ToolFormat.HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Be'),
        ("", [("weather", '{"city": "Be')]),
    ),
    "hermes, arguments first": (
        (AUTO, ToolFormat.HERMES, '<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}'),
        ("", [("f", '{"a": [1, {}]}')]),
    ),
    "hermes, arguments as a string": (
        (AUTO, ToolFormat.HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}'),
        ("", [("f", '{"a": 1}')]),
    ),
    "hermes, one only": (
        (ToolUse(Calling.AUTO, is_parallel=False), ToolFormat.HERMES, HERMES_TWO),
        ("Let me look.", [("weather", '{"city": "Zürich } \\" {"}')]),
    ),
    "llama": (
        (AUTO, ToolFormat.LLAMA_JSON, LLAMA_TWO),
        ("", [("weather", '{"city": "Bern"}'), ("clock", "{}")]),
    ),
    "llama, text": (
        (AUTO, ToolFormat.LLAMA_JSON, ' It is {"name": "late"}.'),
        (' It is {"name": "late"}.', []),
    ),
    "llama, other JSON": ((AUTO, ToolFormat.LLAMA_JSON, '{"a": 1} x'), ('{"a": 1} x', [])),
    "required": (
        (ToolUse(Calling.REQUIRED), None, TWO),
        ("", [("weather", '{"city": "Bern"}'), ("clock", "{}")]),
    ),
    "named": ((ToolUse(Calling.NAMED, "f"), None, '{"a": 1}'), ("", [("f", '{"a": 1}')])),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_text_and_calls_of_each_format(case):
    (use, tool_format, answer), expected = case
    assert read(use, tool_format, answer) == expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_cut_does_not_matter(case):
    (use, tool_format, answer), expected = case
    assert read(use, tool_format, *answer) == expected
    for position in range(len(answer)):
        assert read(use, tool_format, answer[:position], answer[position:]) == expected


@given(st.text(alphabet='<tool_call>/{}[]":, name\\;x'))
def test_no_text_is_too_wild(answer):
    for use, tool_format in (
        (AUTO, ToolFormat.HERMES),
        (AUTO, ToolFormat.LLAMA_JSON),
        (ToolUse(Calling.REQUIRED), None),
    ):
        assert read(use, tool_format, answer) == read(use, tool_format, *answer)


def test_a_name_of_ten_thousand_brackets_is_none():
    scanner = CallScanner()
    for character in '{"name": ' + "[" * 10_000 + "]" * 10_000 + "}":
        scanner.push(character)
    assert (scanner.is_done, scanner.name) == (True, "")


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    )
)
def test_arguments_come_out_as_they_went_in(value):
    call = json.dumps({"name": "f", "arguments": {"value": value}})
    text, ((name, arguments),) = read(AUTO, ToolFormat.HERMES, f"<tool_call>{call}</tool_call>")
    assert (text, name, json.loads(arguments)) == ("", "f", {"value": value})


def test_text_and_models_that_do_not_call_need_no_parser():
    assert new_tool_parser(ToolUse(), ToolFormat.HERMES) is None
    assert new_tool_parser(AUTO, None) is None


def test_a_call_is_told_before_it_is_complete():
    parser = new_tool_parser(AUTO, ToolFormat.HERMES)
    (begun,) = parser.push('<tool_call>{"name": "f", ').deltas
    assert (begun.name, begun.arguments) == ("f", "")
    assert [d.arguments for d in parser.push('"arguments": {"a": ').deltas] == ['{"a": ']
    assert [d.arguments for d in parser.push("1}}").deltas] == ["1}"]


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_an_answer_of_white_space_is_not_held_back_for_ever(tool_format):
    """What is held back is looked at again with every character."""
    parser = new_tool_parser(ToolUse(Calling.AUTO), tool_format)
    shown = [parser.push(" " * 10).text for _ in range(100)]
    held = [10 * number - len("".join(shown[:number])) for number in range(1, 101)]
    assert max(held) <= 260
    assert "".join(shown) + parser.flush().text == " " * 1000
