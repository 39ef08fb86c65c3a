"""Chunks of answers to what clients of the OpenAI API read: events of a stream, or one body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvferry.generation import FinishReason
from router.api.openai_requests import Calling
from router.api.tool_calls import Parsed, new_tool_parser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvferry.generation import OutputToken, TokenLogprobs
    from router.api.answer_streams import PromptChunk
    from router.api.openai_requests import Question
    from router.api.openai_shapes import (
        ChatBodyOut,
        ChatChoice,
        ChatChunk,
        ChatChunkChoice,
        ChatLogprobs,
        ChatMessageOut,
        CompletionBodyOut,
        CompletionChoice,
        CompletionLogprobs,
        Delta,
        TokenLogprob,
        ToolCallDelta,
        ToolCallOut,
        UsageOut,
    )
    from router.api.tool_calls import ToolDelta, ToolParser
    from router.request import Finish, Usage
    from router.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""

_SERVICE_TIERS = {None: None, "auto": "default"}
"""Which tier served a request, where it is not the one asked for."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every event of an answer and its body begin with."""

    id: str
    created: int
    """Seconds of the Unix epoch."""
    model: str


class Answer(Protocol):
    """All answers of one call. Either `events` are used, or `take` and `body`."""

    def events(self, batch: Sequence[PromptChunk]) -> list[Mapping[str, object]]:
        """Of a stream."""
        ...

    def usage_event(self) -> Mapping[str, object]:
        """The last one, where the client asked for it."""
        ...

    def take(self, batch: Sequence[PromptChunk]) -> None:
        """To be told in the body."""
        ...

    def body(self) -> Mapping[str, object]:
        """Once all has been taken."""
        ...


class UsageSum:
    """What all prompts of a call cost together."""

    def __init__(self) -> None:
        self._usages: list[Usage] = []

    def add(self, finish: Finish | None) -> None:
        """Counts at the last end of a prompt's samples, which alone has figures."""
        if finish is not None and finish.usage is not None:
            self._usages.append(finish.usage)

    def total(self) -> UsageOut:
        """OpenAI's figures. Cached is what no worker had to compute."""
        prompt = sum(usage.prompt_tokens for usage in self._usages)
        completion = sum(usage.completion_tokens for usage in self._usages)
        cached = sum(usage.cached_tokens for usage in self._usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


@dataclass(slots=True)
class _Turn:
    """One choice of a chat, as far as it has come."""

    parser: ToolParser | None
    has_begun: bool = False
    text: str = ""
    calls: list[ToolCallOut] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None


class ChatAnswer:
    """Of POST /v1/chat/completions."""

    def __init__(self, question: Question, head: AnswerHead, tokenizer: Tokenizer) -> None:
        self._question = question
        self._head = head
        self._tokenizer = tokenizer
        self._usage = UsageSum()
        template = tokenizer.chat_template
        tool_format = None if template is None else template.tool_format
        self._turns = [
            _Turn(new_tool_parser(question.tool_use, tool_format)) for _ in range(question.samples)
        ]

    def events(self, batch: Sequence[PromptChunk]) -> list[Mapping[str, object]]:
        """The role first, then text and calls, then why it ended: as OpenAI's."""
        events: list[Mapping[str, object]] = []
        for entry in batch:
            index, turn = entry.chunk.index, self._turns[entry.chunk.index]
            if not turn.has_begun:
                turn.has_begun = True
                events.append(self._event(index, {"role": "assistant", "content": ""}))
            logprobs = self._logprobs(entry.chunk.tokens)
            parsed = self._parse(turn, entry)
            if parsed.text or logprobs:
                events.append(self._event(index, {"content": parsed.text}, logprobs=logprobs))
            events += [
                self._event(index, {"tool_calls": [_delta_out(delta)]}) for delta in parsed.deltas
            ]
            if turn.finish_reason is not None:
                events.append(self._event(index, {}, turn=turn))
        return events

    def usage_event(self) -> Mapping[str, object]:
        """Without choices, as OpenAI's."""
        return self._chunk([]) | {"usage": self._usage.total()}

    def take(self, batch: Sequence[PromptChunk]) -> None:
        """To be told in the body."""
        for entry in batch:
            turn = self._turns[entry.chunk.index]
            turn.logprobs += self._logprobs(entry.chunk.tokens) or []
            self._parse(turn, entry)

    def body(self) -> Mapping[str, object]:
        """Once all has been taken."""
        body: ChatBodyOut = {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._choice(index, turn) for index, turn in enumerate(self._turns)],
            "usage": self._usage.total(),
            "service_tier": _tier(self._question),
        }
        return body

    def _parse(self, turn: _Turn, entry: PromptChunk) -> Parsed:
        """Take a chunk into account and say what is new of it."""
        chunk, parser = entry.chunk, turn.parser
        self._usage.add(chunk.finish)
        parsed = Parsed(chunk.text) if parser is None else parser.push(chunk.text)
        if parser is not None and chunk.finish is not None:
            rest = parser.flush()
            parsed = Parsed(parsed.text + rest.text, parsed.deltas + rest.deltas)
        turn.text += parsed.text
        for delta in parsed.deltas:
            _add_delta(turn.calls, delta)
        if chunk.finish is not None:
            turn.finish_reason = self._finish_reason(turn, chunk.finish)
            turn.stop_reason = chunk.finish.stop_string or None
        return parsed

    def _finish_reason(self, turn: _Turn, finish: Finish) -> str:
        is_call = turn.calls and self._question.tool_use.calling is not Calling.NAMED
        if is_call and finish.reason is FinishReason.STOP:
            return "tool_calls"
        return finish.reason.value

    def _choice(self, index: int, turn: _Turn) -> ChatChoice:
        message: ChatMessageOut = {
            "role": "assistant",
            "content": None if turn.calls and not turn.text else turn.text,
            "refusal": None,
        }
        if turn.calls:
            message["tool_calls"] = turn.calls
        logprobs: ChatLogprobs | None = None
        if self._question.has_logprobs:
            logprobs = {"content": turn.logprobs, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": turn.finish_reason,
            "stop_reason": turn.stop_reason,
        }

    def _event(
        self,
        index: int,
        delta: Delta,
        *,
        logprobs: list[TokenLogprob] | None = None,
        turn: _Turn | None = None,
    ) -> Mapping[str, object]:
        """`turn` is given when it has ended."""
        choice: ChatChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": None if turn is None else turn.finish_reason,
        }
        if turn is not None:
            choice["stop_reason"] = turn.stop_reason
        return self._chunk([choice])

    def _chunk(self, choices: list[ChatChunkChoice]) -> dict[str, object]:
        chunk: ChatChunk = {
            "id": self._head.id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
            "service_tier": _tier(self._question),
        }
        if self._question.include_usage:
            chunk["usage"] = None
        return dict(chunk)

    def _logprobs(self, tokens: Sequence[OutputToken]) -> list[TokenLogprob] | None:
        if not self._question.has_logprobs:
            return None
        return [self._token(each.logprobs) for each in tokens if each.logprobs is not None]

    def _token(self, logprobs: TokenLogprobs) -> TokenLogprob:
        top = [_named(self._tokenizer, id_, logprob) for id_, logprob in logprobs.top]
        chosen = _named(self._tokenizer, logprobs.token_id, logprobs.logprob)
        return {**chosen, "top_logprobs": top}


@dataclass(slots=True)
class _Text:
    """One choice of a completion, as far as it has come."""

    text: str = ""
    logprobs: CompletionLogprobs | None = None
    offset: int = 0
    finish_reason: str | None = None
    stop_reason: str | None = None


class CompletionAnswer:
    """Of POST /v1/completions. Sample j of prompt i is choice i * n + j."""

    def __init__(self, question: Question, head: AnswerHead, tokenizer: Tokenizer) -> None:
        self._question = question
        self._head = head
        self._tokenizer = tokenizer
        self._usage = UsageSum()
        self._texts = [_Text() for _ in range(len(question.requests) * question.samples)]

    def events(self, batch: Sequence[PromptChunk]) -> list[Mapping[str, object]]:
        """One for each chunk; the last of a choice says why it ended."""
        events: list[Mapping[str, object]] = []
        for entry in batch:
            index = self._index(entry)
            logprobs = self._take(index, entry)
            text = self._texts[index]
            choice: CompletionChoice = {
                "index": index,
                "text": entry.chunk.text,
                "logprobs": logprobs,
                "finish_reason": text.finish_reason,
                "stop_reason": text.stop_reason,
            }
            chunk = self._whole([choice])
            if self._question.include_usage:
                chunk["usage"] = None
            events.append(chunk)
        return events

    def usage_event(self) -> Mapping[str, object]:
        """Without choices."""
        return self._whole([]) | {"usage": self._usage.total()}

    def take(self, batch: Sequence[PromptChunk]) -> None:
        """To be told in the body."""
        for entry in batch:
            index = self._index(entry)
            text = self._texts[index]
            logprobs = self._take(index, entry)
            text.text += entry.chunk.text
            if logprobs is not None:
                text.logprobs = _joined(text.logprobs, logprobs)

    def body(self) -> Mapping[str, object]:
        """Once all has been taken."""
        choices: list[CompletionChoice] = [
            {
                "index": index,
                "text": text.text,
                "logprobs": text.logprobs,
                "finish_reason": text.finish_reason,
                "stop_reason": text.stop_reason,
            }
            for index, text in enumerate(self._texts)
        ]
        return self._whole(choices) | {"usage": self._usage.total()}

    def _whole(self, choices: list[CompletionChoice]) -> dict[str, object]:
        body: CompletionBodyOut = {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
            "service_tier": _tier(self._question),
        }
        return dict(body)

    def _index(self, entry: PromptChunk) -> int:
        return entry.prompt * self._question.samples + entry.chunk.index

    def _take(self, index: int, entry: PromptChunk) -> CompletionLogprobs | None:
        chunk, text = entry.chunk, self._texts[index]
        self._usage.add(chunk.finish)
        if chunk.finish is not None:
            text.finish_reason = chunk.finish.reason.value
            text.stop_reason = chunk.finish.stop_string or None
        if not self._question.has_logprobs:
            return None
        found: CompletionLogprobs = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": None,
            "text_offset": [],
        }
        for token in chunk.tokens:
            if token.logprobs is not None:
                text.offset = self._add_token(found, token.logprobs, text.offset)
        return found

    def _add_token(self, found: CompletionLogprobs, logprobs: TokenLogprobs, offset: int) -> int:
        """Returns where the next token begins."""
        name = _token_text(self._tokenizer, logprobs.token_id)
        found["tokens"].append(name)
        found["token_logprobs"].append(max(_LEAST_LOGPROB, logprobs.logprob))
        found["text_offset"].append(offset)
        if logprobs.top:
            top = {
                _token_text(self._tokenizer, id_): max(_LEAST_LOGPROB, logprob)
                for id_, logprob in (*logprobs.top, (logprobs.token_id, logprobs.logprob))
            }
            found["top_logprobs"] = [*(found["top_logprobs"] or ()), top]
        return offset + len(name)


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs) -> CompletionLogprobs:
    if first is None:
        return second
    tops = [*(first["top_logprobs"] or ()), *(second["top_logprobs"] or ())]
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": tops or None,
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def _named(tokenizer: Tokenizer, token_id: int, logprob: float) -> TokenLogprob:
    data = tokenizer.token_bytes(token_id)
    text = data.decode("utf-8", "replace")
    return {"token": text, "logprob": max(_LEAST_LOGPROB, logprob), "bytes": list(data)}


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _delta_out(delta: ToolDelta) -> ToolCallDelta:
    if not delta.id:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.index,
        "id": delta.id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }


def _add_delta(calls: list[ToolCallOut], delta: ToolDelta) -> None:
    if delta.id:
        calls.append(
            {
                "id": delta.id,
                "type": "function",
                "function": {"name": delta.name, "arguments": delta.arguments},
            }
        )
    else:
        calls[delta.index]["function"]["arguments"] += delta.arguments


def _tier(question: Question) -> str | None:
    return _SERVICE_TIERS.get(question.service_tier, question.service_tier)
