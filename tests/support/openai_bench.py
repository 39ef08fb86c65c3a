"""The official OpenAI client against a router whose workers follow a script."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai

from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import eventually, router_bench
from tests.support.router_model import byte_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}<tools>{{ t | tojson }}</tools>{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>"
    "{% endfor %}{{ m.tool_call_id }}{% endfor %}"
)

Test = "Callable[[RouterBench, openai.AsyncOpenAI], Awaitable[None]]"


def run(directory: Path, test: Test, *workers: FakeWorker, **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), router_bench(directory, *workers, **settings) as bench:
            url = f"{bench.http_url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                await test(bench, client)
            await eventually(lambda: bench.router.requests_in_flight == 0)

    asyncio.run(main())


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer().encode(text).ids)


def says(text: str, **script: Any) -> FakeWorker:
    return FakeWorker("w", script=lambda _: Script(ids_of(text), **script))
