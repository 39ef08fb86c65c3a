"""Any server of OpenAI's completions, asked over HTTP with server-sent events."""

from __future__ import annotations

import json
import ssl
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import aiohttp

from bench.answer import Failure, Refusal
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.answer import Answer
    from bench.plan import EndpointPlan
    from bench.workload import Prompt

_DATA = b"data:"
_DONE = b"[DONE]"
_LINE_BYTES_MAX = 2**20


class HttpEndpoint:
    """A session of as many connections as are needed; requests go to the servers in turn.

    `ignore_eos` is no field of OpenAI's, but of most servers that are measured; one that does not
    know it may end its answers early.
    """

    def __init__(self, plan: EndpointPlan, api_key: str = "") -> None:
        """Within a running loop. Raises `InvalidInput` for files that cannot be used."""
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._plan = plan
        connector = aiohttp.TCPConnector(limit=0, ssl=ssl_of(plan) or True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),  # requests have deadlines of their own
            read_bufsize=_LINE_BYTES_MAX,
        )

    async def ask(self, answer: Answer, prompt: Prompt, answer_tokens: int) -> None:
        """See `bench.answer.Endpoint`."""
        body = {
            "model": self._plan.model,
            "prompt": prompt if isinstance(prompt, str) else prompt.tolist(),
            "max_tokens": answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        base = self._plan.addresses[answer.index % len(self._plan.addresses)]
        headers = {"content-type": "application/json"}
        answer.sends()
        try:
            async with self._session.post(
                f"{base.rstrip('/')}/completions", data=data, headers=headers
            ) as response:
                if response.status != HTTPStatus.OK:
                    raise _no(response.status)
                await _follow(answer, _events(response))
        except (aiohttp.ClientError, ValueError) as error:
            raise Failure(type(error).__name__) from error

    async def close(self) -> None:
        """Connections are closed."""
        await self._session.close()


def _no(status: int) -> Exception:
    is_refusal = status < HTTPStatus.INTERNAL_SERVER_ERROR
    return (Refusal if is_refusal else Failure)(str(status))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in response.content:
        if line.startswith(_DATA):
            yield line.removeprefix(_DATA).strip()


async def _follow(answer: Answer, events: AsyncIterator[bytes]) -> None:
    is_finished = False
    async for data in events:
        if data == _DONE:
            break
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise Failure(str(event["error"].get("code") or event["error"].get("type")))
        for choice in event.get("choices", ()):
            # Servers hold text back while a character is incomplete: that is no token yet.
            if choice.get("text"):
                answer.brings(1)
            is_finished |= choice.get("finish_reason") is not None
        if event.get("usage"):
            _take_usage(answer, event["usage"])
    if not is_finished:
        raise Failure("no end")


def _take_usage(answer: Answer, told: dict[str, Any]) -> None:
    answer.usage.prompt_tokens = told.get("prompt_tokens")
    answer.usage.answer_tokens = told.get("completion_tokens")
    details = told.get("prompt_tokens_details") or {}
    answer.usage.cached_tokens = details.get("cached_tokens")


def ssl_of(plan: EndpointPlan) -> ssl.SSLContext | None:
    """None: what the system trusts. Raises `InvalidInput`."""
    if not plan.tls_ca:
        return None
    try:
        context = ssl.create_default_context(cafile=plan.tls_ca)
        if plan.tls_certificate:
            context.load_cert_chain(plan.tls_certificate, plan.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput("tls-ca", f"its files cannot be used: {error}") from error
    return context
