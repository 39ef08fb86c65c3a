from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvferry.cache_key import CacheUse, Sharing
from kvferry.errors import InvalidInput, UnknownModel
from kvferry.ids import AdapterId, ExtraKey, RequestId
from kvferry.sampling import SamplingParams
from router.model_card import ModelCard
from router.request import (
    ChatInput,
    ChatMessage,
    ClientRequest,
    PromptInput,
    TextInput,
    TokenInput,
    Tool,
    ToolCall,
)
from router.served_models import ServedModels
from router.tokenizer import Tokenizer
from router.validation import (
    cache_use_of,
    check_fields,
    check_request_id,
    encode_prompt,
    fit_to_context,
    prompt_characters,
)
from tests.support.router_model import byte_tokenizer

MODELS = ServedModels("served", {"sql": AdapterId("5a1e")})
CARD = ModelCard(vocab_size=100, context_length=50, eos_token_ids=(1,), kv_bytes_per_token=8)


def ids(*token_ids: int) -> TokenInput:
    return TokenInput(np.asarray(token_ids, dtype=np.int32))


def request(given: PromptInput | None, model: str = "", salt: str = "", **sampling: Any):
    return ClientRequest("r", model, given, SamplingParams(**sampling), salt)


def chat(*roles: str) -> ChatInput:
    return ChatInput(tuple(ChatMessage(role, "x") for role in roles))


GOOD = TextInput("hello")
USE = CacheUse(ExtraKey(""))


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request(None), "input"),
        (request(TextInput("")), "text"),
        (request(ids()), "token_ids"),
        (request(ids(1, 100)), r"token_ids\[1\]"),
        (request(ids(-1)), r"token_ids\[0\]"),
        (request(chat()), r"chat\.messages"),
        (request(chat("user", "robot")), r"chat\.messages\[1\]\.role"),
        (request(chat(*["user"] * 4097)), r"chat\.messages"),
        (request(GOOD, salt="s" * 257), "cache_salt"),
        (request(GOOD, temperature=-1.0), r"sampling\.temperature"),
        (request(GOOD, temperature=float("nan")), r"sampling\.temperature"),
        (request(GOOD, top_p=2.0), r"sampling\.top_p"),
        (request(GOOD, stop=("x",) * 10_000), r"sampling\.stop"),
        (request(GOOD, stop=("ok", "")), r"sampling\.stop\[1\]"),
        (request(GOOD, stop_token_ids=(100,)), r"sampling\.stop_token_ids\[0\]"),
        (request(GOOD, max_tokens=0), r"sampling\.max_tokens"),
        (request(GOOD, min_tokens=200), r"sampling\.min_tokens"),
        (request(GOOD, logprobs=21), r"sampling\.logprobs"),
        (request(GOOD, logit_bias={100: 1.0}), r"sampling\.logit_bias"),
    ],
)
def test_a_refusal_names_the_field(bad: ClientRequest, field: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}"):
        check_fields(bad, MODELS, CARD)


def test_every_known_role_is_taken() -> None:
    check_fields(request(chat("system", "user", "assistant", "tool")), MODELS, CARD)


def test_only_the_served_model_is_served() -> None:
    check_fields(request(GOOD, model="served"), MODELS, CARD)
    check_fields(request(GOOD, model=""), MODELS, CARD)
    check_fields(request(GOOD, model="sql"), MODELS, CARD)
    with pytest.raises(UnknownModel, match=r"'other'.*'served', 'sql'"):
        check_fields(request(GOOD, model="other"), MODELS, CARD)


def test_an_id_is_given_where_there_is_none() -> None:
    assert check_request_id("mine") == "mine"
    assert check_request_id("") != check_request_id("")
    with pytest.raises(InvalidInput, match=r"^request_id"):
        check_request_id("x" * 129)


def prompt_of(length: int) -> Any:
    return np.zeros(length, dtype=np.int32)


@pytest.mark.parametrize(("length", "room"), [(1, 40), (10, 40), (11, 39), (49, 1)])
def test_the_answer_is_bounded_by_what_the_context_leaves(length: int, room: int) -> None:
    asked = request(GOOD, max_tokens=40, min_tokens=40)
    valid = fit_to_context(RequestId("r"), asked, prompt_of(length), USE, 50)
    assert (valid.sampling.max_tokens, valid.sampling.min_tokens) == (room, room)
    untouched = dataclasses.replace(valid.sampling, max_tokens=40, min_tokens=40)
    assert untouched == asked.sampling


@pytest.mark.parametrize(
    ("given", "field"), [(GOOD, "text"), (ids(1), "token_ids"), (chat("user"), "chat")]
)
@pytest.mark.parametrize("length", [0, 50, 51])
def test_a_prompt_must_leave_room_for_an_answer(
    given: PromptInput, field: str, length: int
) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: has"):
        fit_to_context(RequestId("r"), request(given), prompt_of(length), USE, 50)


def test_model_adapter_and_salt_make_the_extra_key() -> None:
    keys = {
        cache_use_of(request(GOOD, salt=salt), model, AdapterId(adapter)).extra_key
        for model in ("m", "n")
        for adapter in ("", "one", "two")
        for salt in ("", "tenant", "one")
    }
    assert len(keys) == 18
    assert cache_use_of(request(GOOD, model="m"), "m") == cache_use_of(request(GOOD), "m")


def test_sharing_and_priority_are_carried_on() -> None:
    asked = dataclasses.replace(request(GOOD), sharing=Sharing.RECOMPUTED, priority=-100)
    check_fields(asked, MODELS, CARD)
    valid = fit_to_context(RequestId("r"), asked, prompt_of(3), cache_use_of(asked, "m"), 50)
    assert (valid.cache_use.sharing, valid.cache_use.priority) == (Sharing.RECOMPUTED, -100)


@pytest.mark.parametrize("priority", [-101, 101])
def test_a_priority_beyond_its_bounds_is_named(priority: int) -> None:
    asked = dataclasses.replace(request(GOOD), priority=priority)
    with pytest.raises(InvalidInput, match=r"^priority: is -?101; must be from -100 to 100$"):
        check_fields(asked, MODELS, CARD)


def test_token_ids_are_taken_as_they_are() -> None:
    given = ids(5, 6)
    assert encode_prompt(given, Tokenizer(byte_tokenizer(), None), 2) is given.token_ids


def test_all_text_of_a_prompt_is_counted_before_it_is_tokenized() -> None:
    calls = (ToolCall("id", "call", '{"a":1}'),)
    messages = (ChatMessage("user", "four", name="me"), ChatMessage("assistant", "", calls))
    tools = (Tool("f", "does it", '{"type":"object"}'),)
    assert prompt_characters(TextInput("abc")) == 3
    assert prompt_characters(ids(5, 6)) == 0
    assert prompt_characters(ChatInput(messages, tools)) == 4 + 2 + 4 + 7 + 7 + 17
