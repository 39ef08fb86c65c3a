"""Checks a client's request, each refusal naming the field, before any worker hears of it. Pure
but for the tokenizer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from kvferry.cache_key import CacheUse, build_extra_key
from kvferry.errors import InvalidInput
from kvferry.ids import NO_ADAPTER, RequestId, new_request_id
from kvferry.limits import (
    CACHE_PRIORITY_MAX,
    CACHE_SALT_CHARACTERS_MAX,
    CHAT_MESSAGES_MAX,
    REQUEST_ID_CHARACTERS_MAX,
)
from router.request import ChatInput, TextInput, TokenInput, ValidRequest

if TYPE_CHECKING:
    from kvferry.ids import AdapterId, TokenIds
    from kvferry.sampling import SamplingParams
    from router.model_card import ModelCard
    from router.request import ChatMessage, ClientRequest, PromptInput
    from router.served_models import ServedModels
    from router.tokenizer import Tokenizer

CHAT_ROLES = ("system", "user", "assistant", "tool")


def check_request_id(request_id: str) -> RequestId:
    """The client's id, or a fresh one. Raises `InvalidInput`."""
    _require_at_most("request_id", len(request_id), REQUEST_ID_CHARACTERS_MAX, "characters")
    return RequestId(request_id) if request_id else new_request_id()


def check_fields(request: ClientRequest, models: ServedModels, card: ModelCard) -> None:
    """Everything that needs no tokenizer. Raises `InvalidInput` or `UnknownModel`."""
    models.name_of(request.model)
    _require_at_most("cache_salt", len(request.cache_salt), CACHE_SALT_CHARACTERS_MAX, "characters")
    if abs(request.priority) > CACHE_PRIORITY_MAX:
        problem = (
            f"is {request.priority}; must be from -{CACHE_PRIORITY_MAX} to {CACHE_PRIORITY_MAX}"
        )
        raise InvalidInput("priority", problem)
    request.sampling.validate(card.vocab_size)
    match request.input:
        case None:
            raise InvalidInput("input", "is missing; set text, token_ids or chat")
        case TextInput(text):
            if not text:
                raise InvalidInput("text", "must not be empty")
        case TokenInput(token_ids):
            _check_token_ids(token_ids, card)
        case ChatInput():
            _check_chat(request.input)


def prompt_characters(prompt: PromptInput) -> int:
    """How much text `encode_prompt` has to look at."""
    match prompt:
        case TextInput(text):
            return len(text)
        case TokenInput():
            return 0
        case ChatInput(messages, tools, options):
            of_tools = sum(len(tool.description) + len(tool.parameters) for tool in tools)
            return len(options) + of_tools + sum(map(_message_characters, messages))


def encode_prompt(prompt: PromptInput, tokenizer: Tokenizer, tokens_max: int) -> TokenIds:
    """Token ids of a prompt whose fields were checked. May take long: fit for another thread.

    Raises `InvalidInput`, for one of more than `tokens_max` as soon as that is known.
    """
    match prompt:
        case TextInput(text):
            return tokenizer.encode(text, tokens_max)
        case TokenInput(token_ids):
            return token_ids
        case ChatInput(messages, tools, options):
            return tokenizer.encode_chat(messages, tools, options, tokens_max)


def cache_use_of(request: ClientRequest, weights: str, adapter: AdapterId = NO_ADAPTER) -> CacheUse:
    """What the request's KV may be shared with: what has been computed from `weights` with
    `adapter` for the same salt."""
    extra_key = build_extra_key(weights, adapter, request.cache_salt)
    return CacheUse(extra_key, request.sharing, request.priority, adapter)


def fit_to_context(
    request_id: RequestId,
    request: ClientRequest,
    prompt: TokenIds,
    cache_use: CacheUse,
    context_length: int,
) -> ValidRequest:
    """Bound the answer by what the context leaves. Raises `InvalidInput` when nothing is left."""
    assert request.input is not None, "fields are checked first"
    field = input_field(request.input)
    if prompt.size == 0:
        raise InvalidInput(field, "has no tokens")
    if prompt.size >= context_length:
        problem = f"has {prompt.size} tokens; the context of {context_length} leaves no answer"
        raise InvalidInput(field, problem)
    return ValidRequest(
        request_id=request_id,
        prompt=prompt,
        sampling=_clamp_tokens(request.sampling, context_length - int(prompt.size)),
        cache_use=cache_use,
    )


def input_field(prompt: PromptInput) -> str:
    """The name clients know the input by."""
    match prompt:
        case TextInput():
            return "text"
        case TokenInput():
            return "token_ids"
        case ChatInput():
            return "chat"


def _message_characters(message: ChatMessage) -> int:
    of_calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return len(message.content) + len(message.name) + of_calls


def _clamp_tokens(sampling: SamplingParams, room: int) -> SamplingParams:
    return dataclasses.replace(
        sampling,
        max_tokens=min(sampling.max_tokens, room),
        min_tokens=min(sampling.min_tokens, room),
    )


def _check_token_ids(token_ids: TokenIds, card: ModelCard) -> None:
    if token_ids.size == 0:
        raise InvalidInput("token_ids", "must not be empty")
    wrong = np.flatnonzero((token_ids < 0) | (token_ids >= card.vocab_size))
    if wrong.size:
        position = int(wrong[0])
        problem = f"is {token_ids[position]}; must be below the vocabulary of {card.vocab_size}"
        raise InvalidInput(f"token_ids[{position}]", problem)


def _check_chat(chat: ChatInput) -> None:
    if not chat.messages:
        raise InvalidInput("chat.messages", "must not be empty")
    _require_at_most("chat.messages", len(chat.messages), CHAT_MESSAGES_MAX, "messages")
    for position, message in enumerate(chat.messages):
        if message.role not in CHAT_ROLES:
            known = ", ".join(CHAT_ROLES)
            problem = f"is {message.role[:32]!r}; must be one of {known}"
            raise InvalidInput(f"chat.messages[{position}].role", problem)


def _require_at_most(field: str, length: int, longest: int, of_what: str) -> None:
    if length > longest:
        raise InvalidInput(field, f"has {length} {of_what}; at most {longest}")
