"""The OpenAI API when something is wrong: input, workers, clients, limits; and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx2
import openai
import pytest

from kvferry.errors import ConfigError, InternalError
from kvferry.generation import AttemptUsage
from kvferry.rpc.v1 import inference_pb2
from router.api.http_server import serve_http
from router.api.request_metrics import RequestMetrics
from tests.support.fake_worker import Script
from tests.support.openai_bench import HI, TOOLS, ids_of, run, says
from tests.support.router_bench import SERVED, RouterBench, eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "boss", "content": "a"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0].type",
    ),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 1, "min_tokens": 2}, 400, "min_tokens"),
    (CHAT, {"messages": HI, "tools": TOOLS}, 400, "tools"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "stream_options": {}}, 400, "stream_options"),
    (
        CHAT,
        {"messages": HI, "chat_template_kwargs": {"messages": []}},
        400,
        "chat_template_kwargs.messages",
    ),
    (TEXT, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (CHAT, {"messages": HI, "functions": []}, 400, "functions"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages"),
    (
        CHAT,
        {"messages": HI, "guided_regex": "a", "response_format": {"type": "json_object"}},
        400,
        "guided_regex",
    ),
    (TEXT, {"prompt": "a", "guided_regex": "("}, 400, "guided_regex"),
    (
        TEXT,
        {"prompt": "a", "structured_outputs": {"grammar": "start: ("}},
        400,
        "structured_outputs.grammar",
    ),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": ["a", ""]}, 400, "prompt[1]"),
    (TEXT, {"prompt": [1, 5000]}, 400, "prompt[1]"),
    (TEXT, {"prompt": [[1], [5000]]}, 400, "prompt[1][0]"),
    (TEXT, {"prompt": "a", "echo": True}, 400, "echo"),
    (TEXT, {"prompt": "a", "n": 17}, 400, "n"),
    (TEXT, {"prompt": "a", "logit_bias": {"5000": 1}}, 400, "logit_bias (token id)"),
    (TEXT, {"prompt": "a", "stop": ["a", ""]}, 400, "stop[1]"),
    (TEXT, {"prompt": "a", "temperature": "1"}, 400, "temperature"),
    (TEXT, {"prompt": "a", "model": "gpt"}, 404, "model"),
]


def test_what_is_wrong_is_named_as_the_client_names_it(directory: Path) -> None:
    worker = says("a")

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        async with aiohttp.ClientSession(bench.http_url) as session:
            for path, body, status, param in WRONG:
                async with session.post(path, json=body) as response:
                    error = (await response.json())["error"]
                    assert (response.status, error["param"]) == (status, param), body
                    assert error["type"] == "invalid_request_error"
                    assert error["message"].startswith(f"{param}:")
        # Of a list of prompts the good ones may have begun before the bad one was looked at.
        assert all(request.prompt.size == 1 for request in worker.requests)

    run(directory, test, worker)


def test_what_http_itself_refuses(directory: Path) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        json_type = {"Content-Type": "application/json"}
        cases = [
            ("POST", TEXT, b"{", json_type, 400, "body"),
            ("POST", TEXT, b"[" * 1000, json_type, 400, "recursion"),
            ("POST", TEXT, b"\xff", json_type, 400, "body"),
            ("POST", TEXT, b"{}", {"Content-Type": "text/plain"}, 415, "content-type"),
            ("POST", TEXT, io.BytesIO(b" " * (2**24 + 1)), json_type, 413, "16777216"),
            ("GET", TEXT, None, {}, 405, "POST"),
            ("GET", "/v2", None, {}, 404, "/v2"),
            ("GET", "/v2/a%20b", None, {}, 404, "/v2/a%20b: there is no such path"),
            ("POST", TEXT, b"{}", json_type | {"x-request-id": "\xe9"}, 400, "x-request-id"),
            ("POST", TEXT, b"{}", json_type | {"x-kvferry-timeout-s": "x"}, 400, "x-kvferry-time"),
            ("POST", TEXT, b"{}", json_type | {"x-kvferry-timeout-s": "nan"}, 400, "x-kvferry-t"),
        ]
        async with aiohttp.ClientSession(bench.http_url) as session:
            for method, path, data, headers, status, words in cases:
                async with session.request(method, path, data=data, headers=headers) as response:
                    assert response.status == status, (method, path, headers)
                    assert words in (await response.json())["error"]["message"]
            async with session.options(TEXT) as response:
                assert (response.status, response.headers["Allow"]) == (204, "OPTIONS, POST")
            async with session.head("/v1/models") as response:
                assert response.status == 200
            async with session.get("/health") as response:
                assert response.status == 200
            async with session.get("/ready") as response:
                assert response.status == 200
            await bench.members()
            async with session.get("/ready") as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")

    run(directory, test, says("a"))


def test_errors_of_workers_before_and_within_a_stream(directory: Path) -> None:
    worker = says("abcdef", fail_after=0, fail_with=InternalError("scripted"))

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        ask = {"model": SERVED, "prompt": "a", "stream": True}
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(**ask)
        assert caught.value.status_code >= 500
        failing = Script(ids_of("abcdef"), fail_after=2, fail_with=InternalError("scripted"))
        worker.script = lambda _: failing
        stream = await client.completions.create(**ask)
        assert (await anext(aiter(stream))).choices[0].text.startswith("a")
        with pytest.raises(openai.APIError) as within:
            await _drain(stream)
        assert within.value.type == "server_error"
        assert not isinstance(within.value, openai.APIStatusError)

    run(directory, test, worker)


def test_a_cancellation_of_something_else_ends_the_call_as_a_fault(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        generate = bench.router.generate

        async def cut_off(request: Any) -> AsyncIterator[Any]:
            async with contextlib.aclosing(generate(request)) as chunks:
                yield await anext(chunks)
                raise asyncio.CancelledError

        monkeypatch.setattr(bench.router, "generate", cut_off)
        ask = {"model": SERVED, "prompt": "a"}
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(**ask)
        stream = await client.completions.create(**ask, stream=True)
        with pytest.raises(openai.APIError) as within:
            await _drain(stream)
        assert within.value.type == "server_error"

    run(directory, test, says("abcdef", hang_after=3))


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass


def test_a_client_that_goes_away_ends_its_request(directory: Path) -> None:
    worker = says("abc", hang_after=1)

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(model=SERVED, prompt="a", stream=True)
        await anext(aiter(stream))
        await stream.close()
        await eventually(lambda: len(worker.cancelled) == 1)
        whole = asyncio.create_task(client.completions.create(model=SERVED, prompt="a"))
        await eventually(lambda: len(worker.requests) == 2)
        whole.cancel()
        await eventually(lambda: len(worker.cancelled) == 2)

    run(directory, test, worker)


def test_a_request_can_be_cancelled_by_the_id_of_its_header(directory: Path) -> None:
    worker = says("abc", hang_after=1)

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        call = asyncio.create_task(
            client.completions.create(
                model=SERVED, prompt="a", extra_headers={"X-Request-Id": "mine"}
            )
        )
        await eventually(lambda: bool(worker.requests))
        cancel = inference_pb2.CancelRequest(request_id="cmpl-mine")
        assert (await bench.inference.Cancel(cancel)).found
        with pytest.raises(openai.APIStatusError) as caught:
            await call
        assert caught.value.status_code == 499

    run(directory, test, worker)


def test_deadlines_and_overload_have_their_statuses(directory: Path) -> None:
    worker = says("abc", hang_after=1)

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        ask = {"model": SERVED, "prompt": "a"}
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(**ask, extra_headers={"x-kvferry-timeout-s": "0.2"})
        assert caught.value.status_code == 504
        streams = [await client.completions.create(**ask, stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(**ask)
        assert float(refused.value.response.headers["retry-after"]) >= 1
        assert float(refused.value.response.headers["retry-after-ms"]) > 0
        for stream in streams:
            await stream.close()

    run(
        directory,
        test,
        worker,
        requests_max=2,
        classes=_no_queues(),
    )


def _no_queues() -> Any:
    from kvferry.router_config import ServiceClassConfig, ServiceClassesConfig

    none = ServiceClassConfig(queue_max=0)
    return ServiceClassesConfig(none, none, none)


def test_metrics_count_requests_of_both_protocols(directory: Path) -> None:
    worker = says("abc", usage=AttemptUsage(prefill_hit_tokens=1))

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        await client.completions.create(model=SERVED, prompt="a")
        await bench.ask("ab")
        async with (
            aiohttp.ClientSession(bench.http_url) as session,
            session.get("/metrics") as response,
        ):
            assert response.content_type == "text/plain"
            lines = (await response.text()).splitlines()
        for line in (
            'kvferry_request_success_total{finished_reason="stop"} 2.0',
            "kvferry_prompt_tokens_total 3.0",
            "kvferry_generation_tokens_total 6.0",
            "kvferry_prefix_cache_hits_total 2.0",
            "kvferry_time_to_first_token_seconds_count 2.0",
            'kvferry_kv_slots{account="free",role="both",worker="w"} 10000.0',
        ):
            assert line in lines

    run(directory, test, worker)


def test_a_port_in_use_names_its_setting(directory: Path) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        port = int(bench.http_url.rpartition(":")[2])
        metrics = RequestMetrics(bench.router, bench.router.clock)
        with pytest.raises(ConfigError) as caught:
            await serve_http(replace(bench.doors, metrics=metrics), ("127.0.0.1", port))
        assert caught.value.field == "router.http.port"

    run(directory, test, says("a"))


def test_stopping_gives_running_calls_a_while(directory: Path) -> None:
    worker = says("abc", hang_after=2)

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(model=SERVED, prompt="a", stream=True)
        before = asyncio.get_running_loop().time()
        await bench.http_door.stop(0.3)
        assert 0.3 <= asyncio.get_running_loop().time() - before < 3.0
        with pytest.raises(httpx2.RemoteProtocolError):
            await stream.response.aread()
        await eventually(lambda: len(worker.cancelled) == 1)

    run(directory, test, worker)
