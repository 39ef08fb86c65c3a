"""Handlers of `/v1`: bodies in, answers out, as events while they come or as one body."""

from __future__ import annotations

import asyncio
import json
import math
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from aiohttp import web

from kvferry.errors import DeadlineExceeded, InvalidInput
from kvferry.trace_context import TRACEPARENT, TRACESTATE, parse_traceparent
from router.api.answer_streams import PromptFailed, answer_streams
from router.api.http_errors import HttpRefusal, error_body
from router.api.http_failures import CallFailed, server_fault
from router.api.openai_answers import AnswerHead, ChatAnswer, CompletionAnswer
from router.api.openai_body import Body, ChatBody, CompletionBody
from router.api.openai_requests import (
    REQUEST_ID_HEADER,
    TIMEOUT_HEADER,
    Caller,
    chat_question,
    completion_question,
    read_body,
)
from router.api.security import TENANT_HEADER, account_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from router.api.answer_streams import PromptChunk
    from router.api.openai_answers import Answer
    from router.api.openai_requests import Question
    from router.api.openai_shapes import ModelList, ModelOut
    from router.api.request_metrics import RequestMetrics
    from router.api.security import Security
    from router.router import Router

Batches: TypeAlias = "AsyncGenerator[list[PromptChunk], None]"
_BodyT = TypeVar("_BodyT", bound=Body)

_BODY_TIMEOUT_S = 30.0
"""For the whole body to arrive: 16 MiB over a slow line of 5 Mbit/s."""
_INLINE_BODY_BYTES_MAX = 64 * 1024
"""A larger body is read beside the event loop: this much takes about a millisecond."""
_READ_GRACE_S = 1.0
"""The router's own deadline comes first, with its better message."""


class OpenAiService:
    """Translates between the OpenAI API and the router."""

    def __init__(self, router: Router, metrics: RequestMetrics, security: Security | None) -> None:
        """Without `security` anybody may call, for whichever tenant they name."""
        self._router = router
        self._metrics = metrics
        self._security = security
        self._started_at = _unix_time()

    def add_routes(self, routes: web.UrlDispatcher) -> None:
        """Everything below /v1."""
        routes.add_post("/v1/chat/completions", self.chat)
        routes.add_post("/v1/completions", self.completions)
        routes.add_get("/v1/models", self.models)
        # Any name: a line break in one is unknown, not another path.
        routes.add_get(r"/v1/models/{model:[\s\S]+}", self.model)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        caller = self._caller(request, "chatcmpl")
        question = chat_question(await _read(request, ChatBody), caller)
        head = self._head(question)
        return await self._answer(
            request, question, ChatAnswer(question, head, self._router.tokenizer)
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        caller = self._caller(request, "cmpl")
        question = completion_question(await _read(request, CompletionBody), caller)
        head = self._head(question)
        return await self._answer(
            request, question, CompletionAnswer(question, head, self._router.tokenizer)
        )

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        self._tenant(request)
        entries = [self._model(name) for name in self._router.models.names]
        models: ModelList = {"object": "list", "data": entries}
        return web.json_response(models)

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        self._tenant(request)
        name = self._router.models.name_of(request.match_info["model"])
        return web.json_response(self._model(name))

    def _model(self, name: str) -> ModelOut:
        models = self._router.models
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "kvferry",
            "max_model_len": self._router.card.context_length,
            "parent": models.model if name in models.adapters else None,
        }

    def _caller(self, request: web.Request, kind: str) -> Caller:
        """Raises `InvalidInput` naming a header, and what `authenticate` raises."""
        given_id = _header(request, REQUEST_ID_HEADER) or os.urandom(12).hex()
        return Caller(
            request_id=f"{kind}-{given_id}",
            tenant=self._tenant(request),
            timeout_s=_timeout_s(_header(request, TIMEOUT_HEADER)),
            seed=self._router.draw_seed(),
            # What is no valid header begins a trace, as the standard asks, and refuses nothing.
            trace=parse_traceparent(
                request.headers.get(TRACEPARENT, ""), request.headers.get(TRACESTATE, "")
            ),
        )

    def _tenant(self, request: web.Request) -> str:
        """On whose account the call goes."""
        security = self._security
        needs_key = security is not None and security.asks_for_keys
        key_tenant = security.tenant_of(request.headers) if security and needs_key else ""
        return account_of(key_tenant, _header(request, TENANT_HEADER))

    def _head(self, question: Question) -> AnswerHead:
        # One that is not served is refused with the request.
        model = question.requests[0].model or self._router.models.model
        return AnswerHead(question.id, _unix_time(), model)

    async def _answer(
        self, request: web.Request, question: Question, answer: Answer
    ) -> web.StreamResponse:
        """A client that goes away cancels this coroutine, and so its requests."""
        longest_s = self._router.config.router.request_timeout_s + _READ_GRACE_S
        try:
            # Bounds a client that does not read, which the router's own deadline cannot see.
            async with (
                asyncio.timeout(longest_s),
                answer_streams(self._metrics.generate, question.requests) as batches,
            ):
                if question.is_stream:
                    return await self._stream(request, question, answer, batches)
                async for batch in batches:
                    answer.take(batch)
        except PromptFailed as failure:
            raise CallFailed(failure.error, question.names_of(failure.prompt)) from failure
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise DeadlineExceeded(f"the answer was not read within {longest_s:g} s") from error
        headers = {REQUEST_ID_HEADER: question.id}
        return web.json_response(answer.body(), headers=headers)

    async def _stream(
        self, request: web.Request, question: Question, answer: Answer, batches: Batches
    ) -> web.StreamResponse:
        """The status waits for the first token, so that a refusal is a refusal."""
        first = await anext(batches)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # Proxies must not collect events.
                "X-Accel-Buffering": "no",
                REQUEST_ID_HEADER: question.id,
            }
        )
        await response.prepare(request)
        try:
            await response.write(_events(answer.events(first)))
            async for batch in batches:
                await response.write(_events(answer.events(batch)))
        except PromptFailed as failure:
            names = question.names_of(failure.prompt)
            # No [DONE] follows: the answer is not complete.
            await response.write(_event(error_body(failure.error, names)))
            return response
        except Exception as error:
            if isinstance(error, ConnectionError):
                raise  # The client is gone.
            await response.write(_event(error_body(server_fault("a stream failed"))))
            return response
        if question.include_usage:
            await response.write(_event(answer.usage_event()))
        await response.write(b"data: [DONE]\n\n")
        return response


async def _read(request: web.Request, kind: type[_BodyT]) -> _BodyT:
    """Raises `InvalidInput` naming the field, or `HttpRefusal`."""
    if request.content_type != "application/json":
        message = "content-type: must be application/json"
        raise HttpRefusal(415, "unsupported_media_type", message)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        message = "content-encoding: must be identity, which is the default"
        raise HttpRefusal(415, "unsupported_media_type", message)
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            data = await request.read()
    except TimeoutError as error:
        message = f"body: did not arrive within {_BODY_TIMEOUT_S:g} s"
        raise HttpRefusal(408, "request_timeout", message) from error
    except web.HTTPRequestEntityTooLarge as error:
        message = f"body: has more than {request.client_max_size} bytes"
        raise HttpRefusal(413, "request_too_large", message) from error
    except web.RequestPayloadError as error:
        raise HttpRefusal(400, "invalid_body", "body: is not framed as HTTP asks") from error
    if len(data) <= _INLINE_BODY_BYTES_MAX:
        return read_body(kind, data)
    return await asyncio.to_thread(read_body, kind, data)


def _header(request: web.Request, name: str) -> str:
    """Empty if there is none. Raises `InvalidInput`."""
    value = request.headers.get(name, "")
    if not (value.isascii() and value.isprintable()):
        raise InvalidInput(name, "must be printable ASCII")
    return value


def _timeout_s(text: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise InvalidInput(TIMEOUT_HEADER, f"is {text[:32]!r}; must be seconds") from error
    if not (math.isfinite(value) and value > 0):
        raise InvalidInput(TIMEOUT_HEADER, f"is {text[:32]!r}; must be above 0")
    return value


def _events(events: list[Mapping[str, object]]) -> bytes:
    return b"".join(map(_event, events))


def _event(data: Mapping[str, object]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def _unix_time() -> int:
    return int(datetime.now(UTC).timestamp())
