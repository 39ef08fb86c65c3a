"""What a chat template is told of tools, and what is refused that it has no place for."""

from __future__ import annotations

import pytest

from kvferry.errors import InvalidInput
from router.chat_template import ChatTemplate, ToolFormat
from router.request import ChatMessage, Tool, ToolCall

KNOWS = (
    "{% for t in tools or [] %}{{ t.function.name }}"
    "({{ t.function.parameters.properties | length }}){% endfor %}"
    "<tool_call>{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.arguments.a }}{% endfor %}"
    "{{ m.tool_call_id }}{{ m.name }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
HI = ChatMessage("user", "hi")


def test_tools_calls_and_their_results_are_shown():
    template = ChatTemplate(KNOWS, {})
    assert template.has_tools
    tools = [Tool("f", "", '{"type": "object", "properties": {"a": {}}}'), Tool("g")]
    turns = [
        HI,
        ChatMessage("assistant", "", (ToolCall("c1", "f", '{"a": 7}'),)),
        ChatMessage("tool", "done", tool_call_id="c1", name="f"),
    ]
    assert template.render(turns, tools) == ("f(1)g(0)<tool_call>user:hiassistant:c1=7tool:donec1f")


@pytest.mark.parametrize(
    ("source", "tool_format"),
    [
        (KNOWS, ToolFormat.HERMES),
        ('{{ tools }} {"name": x, "parameters": y}', ToolFormat.LLAMA_JSON),
        ("{{ tools }}", None),
        ("<tool_call>", None),
    ],
)
def test_the_format_of_calls_is_told_by_what_the_template_shows(source, tool_format):
    assert ChatTemplate(source, {}).tool_format is tool_format


CALL = ChatMessage("assistant", "", (ToolCall("c", "f", "{}"),))


@pytest.mark.parametrize(
    ("source", "messages", "tools", "field"),
    [
        (PLAIN, [HI], [Tool("f")], "chat.tools"),
        (PLAIN, [HI, CALL], [], "chat.messages[1].tool_calls"),
        (KNOWS, [HI], [Tool("f", "", "{")], "chat.tools[0].parameters"),
        (KNOWS, [HI], [Tool("f", "", "[" * 100_000)], "chat.tools[0].parameters"),
        (KNOWS, [HI], [Tool("f", "", "[]")], "chat.tools[0].parameters"),
        (
            KNOWS,
            [ChatMessage("assistant", "", (ToolCall("c", "f", "no"),))],
            [],
            "chat.messages[0].tool_calls[0].function.arguments",
        ),
        ("{{ messages[0].content + 1 }}", [HI], [], "chat.messages"),
        ("{{ messages[0].content.x.y }}", [HI], [], "chat.messages"),
        ("{{ 1 // (messages | length - 1) }}", [HI], [], "chat.messages"),
    ],
)
def test_what_a_template_has_no_place_for_is_refused_by_name(source, messages, tools, field):
    with pytest.raises(InvalidInput) as caught:
        ChatTemplate(source, {}).render(messages, tools)
    assert caught.value.field == field


def test_options_that_the_template_has_are_its_variables_and_others_are_ignored():
    source = "{{ bos_token }}{% if think is defined and not think %}quick{% endif %}{{ m }}"
    template = ChatTemplate(source + "{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert template.render([HI]) == "hi"
    assert template.render([HI], options='{"think": false, "other": 1, "range": 2}') == "quickhi"
    assert template.render([HI], options='{"think": true}') == "hi"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ('{"messages": []}', "chat.template_options.messages"),
        ('{"add_generation_prompt": false}', "chat.template_options.add_generation_prompt"),
        ('{"bos_token": "x"}', "chat.template_options.bos_token"),
        ("[]", "chat.template_options"),
        ("{", "chat.template_options"),
    ],
)
def test_what_the_conversation_is_is_no_option(options, field):
    template = ChatTemplate("{{ bos_token }}" + PLAIN, {"bos_token": "<s>"})
    with pytest.raises(InvalidInput) as caught:
        template.render([HI], options=options)
    assert caught.value.field == field
