"""Bodies that are wrong in many places cost what one wrong place costs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from kvferry.errors import InvalidInput
from kvferry.limits import LOGIT_BIAS_ENTRIES_MAX
from router.api.openai_body import Body, ChatBody, CompletionBody
from router.api.openai_requests import read_body

HI = [{"role": "user", "content": "hi"}]
MANY = 100 * ["wrong"]
LONG: list[tuple[type[Body], dict[str, Any], str]] = [
    (CompletionBody, {"prompt": [1, *MANY]}, "prompt[1]"),
    (CompletionBody, {"prompt": [[1, *MANY]]}, "prompt[0][1]"),
    (CompletionBody, {"prompt": [[1], *MANY]}, "prompt[1]"),
    (CompletionBody, {"prompt": ["a", *(100 * [1])]}, "prompt[1]"),
    (CompletionBody, {"prompt": "a", "stop": 100 * [1]}, "stop[0]"),
    (CompletionBody, {"prompt": "a", "stop_token_ids": MANY}, "stop_token_ids[0]"),
    (CompletionBody, {"prompt": "a", "guided_choice": 100 * [1]}, "guided_choice[0]"),
    (CompletionBody, {"prompt": "a", "bad_words": 100 * [1]}, "bad_words"),
    (ChatBody, {"messages": MANY}, "messages[0]"),
    (ChatBody, {"messages": [{"role": "user", "content": MANY}]}, "messages[0].content[0]"),
    (
        ChatBody,
        {"messages": [{"role": "assistant", "tool_calls": MANY}]},
        "messages[0].tool_calls[0]",
    ),
    (ChatBody, {"messages": HI, "tools": MANY}, "tools[0]"),
]


@pytest.mark.parametrize(("kind", "body", "field"), LONG)
def test_of_many_wrong_elements_one_is_told(
    kind: type[Body], body: dict[str, Any], field: str
) -> None:
    data = json.dumps(body).encode()
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(data)
    assert caught.value.error_count() == 1
    with pytest.raises(InvalidInput) as refused:
        read_body(kind, data)
    assert refused.value.field == field


def test_biases_are_counted_before_they_are_looked_at() -> None:
    biases = {f"x{number}": "wrong" for number in range(LOGIT_BIAS_ENTRIES_MAX + 1)}
    data = json.dumps({"messages": HI, "logit_bias": biases}).encode()
    with pytest.raises(InvalidInput, match=r"^logit_bias: has 1025 entries; at most 1024$"):
        read_body(ChatBody, data)
    good = {str(number): 1 for number in range(LOGIT_BIAS_ENTRIES_MAX)}
    body = read_body(ChatBody, json.dumps({"messages": HI, "logit_bias": good}).encode())
    assert body.logit_bias == good
