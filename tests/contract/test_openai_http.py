"""The OpenAI API with the official client, against a router whose workers follow a script."""

from __future__ import annotations

import asyncio
import io
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx2
import openai
import pytest

from kvferry.cache_key import CacheUse, Sharing
from kvferry.errors import ConfigError, InternalError
from kvferry.generation import AttemptUsage, FinishReason
from kvferry.rpc.v1 import inference_pb2
from kvferry.sampling import Constraint, ConstraintKind
from router.api.http_server import serve_http
from router.api.request_metrics import RequestMetrics
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import SERVED, RouterBench, eventually, router_bench
from tests.support.router_model import byte_tokenizer, extra_key, write_model

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


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def run(directory: Path, test: Test, *workers: FakeWorker, **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), router_bench(directory, *workers, **settings) as bench:
            url = f"{bench.http_url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                await test(bench, client)
            await eventually(lambda: bench.router.requests_in_flight == 0)

    asyncio.run(main())


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer().encode(text).ids)


def says(text: str, **script: Any) -> FakeWorker:
    return FakeWorker("w", script=lambda _: Script(ids_of(text), **script))


def test_chat_whole_and_streamed(directory: Path) -> None:
    usage = AttemptUsage(prefill_hit_tokens=4, decode_hit_tokens=2, host_hit_tokens=8)
    worker = says("grüezi 🚢", usage=usage)

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(model=SERVED, messages=HI)
        (choice,) = whole.choices
        assert choice.message.content == "grüezi 🚢"
        assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
        assert whole.usage.prompt_tokens == 22
        assert whole.usage.completion_tokens == len(ids_of("grüezi 🚢"))
        assert whole.usage.total_tokens == 22 + whole.usage.completion_tokens
        assert whole.usage.prompt_tokens_details.cached_tokens == 12
        events = [
            event
            async for event in await client.chat.completions.create(
                model=SERVED,
                messages=HI,
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
        assert events[0].choices[0].delta.role == "assistant"
        text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
        assert text == "grüezi 🚢"
        ends = [e.choices[0].finish_reason for e in events if e.choices]
        assert ends == [None] * (len(ends) - 1) + ["stop"]
        assert not events[-1].choices
        assert events[-1].usage == whole.usage
        assert all(event.usage is None for event in events[:-1])
        assert len({event.id for event in events}) == 1
        plain = client.chat.completions.create(model=SERVED, messages=HI, stream=True)
        assert not [e async for e in await plain if not e.choices]

    run(directory, test, worker)


def test_samples_and_lists_of_prompts_are_choices(directory: Path) -> None:
    worker = FakeWorker(
        "w", script=lambda r: Script(samples=(tuple(r.prompt.tolist()), ids_of("other")))
    )

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        chat = await client.chat.completions.create(model=SERVED, messages=HI, n=2)
        assert [choice.message.content for choice in chat.choices][1] == "other"
        ask = {"model": SERVED, "n": 2, "max_tokens": 50}
        expected = ["ab", "other", "cd", "other"]
        for prompt in (["ab", "cd"], [list(ids_of("ab")), list(ids_of("cd"))]):
            whole = await client.completions.create(prompt=prompt, **ask)
            assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
            assert [choice.text for choice in whole.choices] == expected
            assert whole.usage.prompt_tokens == 4
            texts = ["", "", "", ""]
            async for event in await client.completions.create(prompt=prompt, stream=True, **ask):
                texts[event.choices[0].index] += event.choices[0].text
            assert texts == expected
        single = await client.completions.create(prompt=list(ids_of("xy")), model=SERVED, n=2)
        assert single.choices[0].text == "xy"

    run(directory, test, worker)


def test_every_parameter_reaches_the_worker(directory: Path) -> None:
    worker = says("a")

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        await client.chat.completions.create(
            model=SERVED,
            messages=HI,
            n=1,
            seed=-1,
            stop=["END", "x"],
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.25,
            presence_penalty=1.5,
            frequency_penalty=-1.5,
            logit_bias={"65": -100},
            logprobs=True,
            top_logprobs=3,
            user="somebody",
            service_tier="flex",
            extra_body={
                "top_k": 5,
                "min_p": 0.125,
                "repetition_penalty": 1.25,
                "ignore_eos": True,
                "min_tokens": 2,
                "stop_token_ids": [9],
                "priority": 7,
                "cache_salt": "salt",
                "sharing": "recomputed",
                "some_new_hint": {"a": 1},
            },
        )
        (request,) = worker.requests
        sampling = request.sampling
        assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (2**64 - 1, 7, 2)
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 5)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1.5)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.25)
        assert dict(sampling.logit_bias) == {65: -100.0}
        assert (sampling.logprobs, sampling.ignore_eos) == (3, True)
        assert sampling.stop_token_ids == (9,)
        assert request.cache_use == CacheUse(extra_key("salt"), Sharing.RECOMPUTED, 7)
        await client.completions.create(model=SERVED, prompt="a")
        assert worker.requests[-1].sampling.max_tokens == 16
        await client.chat.completions.create(model=SERVED, messages=HI)
        assert worker.requests[-1].sampling.max_tokens == 512 - 22

    run(directory, test, worker)


def test_a_stop_string_may_be_one_or_a_list(directory: Path) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        for stop in ("END", ["x", "END"]):
            answer = await client.completions.create(model=SERVED, prompt="a", stop=stop)
            assert answer.choices[0].text == "one "
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].model_extra["stop_reason"] == "END"

    run(directory, test, says("one END two"))


def test_an_answer_cut_by_its_length_says_so(directory: Path) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(model=SERVED, prompt="a")
        assert answer.choices[0].finish_reason == "length"

    run(directory, test, says("abc", reason=FinishReason.LENGTH))


def test_logprobs_of_chat_and_of_completions(directory: Path) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        chat = await client.chat.completions.create(
            model=SERVED, messages=HI, logprobs=True, top_logprobs=1
        )
        tokens = chat.choices[0].logprobs.content
        assert bytes(byte for token in tokens for byte in token.bytes).decode() == "né"
        assert [token.logprob for token in tokens] == [-0.5] * 3
        assert tokens[0].token == tokens[0].top_logprobs[0].token == "n"
        events = await client.chat.completions.create(
            model=SERVED, messages=HI, logprobs=True, top_logprobs=1, stream=True
        )
        streamed = [
            token
            async for event in events
            if event.choices[0].logprobs
            for token in event.choices[0].logprobs.content
        ]
        assert streamed == tokens
        answer = await client.completions.create(model=SERVED, prompt="a", logprobs=1)
        logprobs = answer.choices[0].logprobs
        assert logprobs.tokens == ["n", "\ufffd", "\ufffd"]
        assert logprobs.token_logprobs == [-0.5] * 3
        assert logprobs.text_offset == [0, 1, 2]
        assert logprobs.top_logprobs[0] == {"n": -0.5}
        bare = await client.completions.create(model=SERVED, prompt="a", logprobs=0)
        assert bare.choices[0].logprobs.token_logprobs == [-0.5] * 3

    run(directory, test, says("né", logprob=-0.5))


def test_models(directory: Path) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == [SERVED]
        assert (await client.models.retrieve(SERVED)).id == SERVED
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("other")
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")

    run(directory, test, says("a"))


CONSTRAINTS: list[tuple[dict[str, Any], Constraint]] = [
    (
        {"response_format": {"type": "json_object"}},
        Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"object"}'),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"type": "array"}},
            }
        },
        Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "array"}'),
    ),
    (
        {"guided_json": '{"type": "null"}'},
        Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "null"}'),
    ),
    ({"guided_regex": "[ab]+"}, Constraint(ConstraintKind.REGEX, "[ab]+")),
    ({"guided_choice": ["a.", "b"]}, Constraint(ConstraintKind.REGEX, r"(a\.)|(b)")),
    ({"guided_grammar": 'start: "a"'}, Constraint(ConstraintKind.GRAMMAR, 'start: "a"')),
    (
        {"structured_outputs": {"json": {"type": "null"}}},
        Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "null"}'),
    ),
    ({"structured_outputs": {"regex": "a"}}, Constraint(ConstraintKind.REGEX, "a")),
]


def test_constraints_reach_the_worker_whatever_they_are_called(directory: Path) -> None:
    worker = says("a")

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        for fields, expected in CONSTRAINTS:
            await client.completions.create(model=SERVED, prompt="a", extra_body=fields)
            assert worker.requests[-1].sampling.constraint == expected, fields

    run(directory, test, worker)


def test_tools_are_shown_to_the_model_and_its_calls_found(directory: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = TOOL_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    worker = says(f"Well.\n{call}")

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        ask: dict[str, Any] = {"model": SERVED, "messages": HI, "tools": TOOLS}
        answer = await client.chat.completions.create(**ask)
        assert '"name": "weather"' in bench.router.tokenizer.decode(worker.requests[-1].prompt)
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
        (found,) = choice.message.tool_calls
        assert (found.function.name, found.function.arguments) == ("weather", '{"city": "Bern"}')
        name, arguments = "", ""
        async for event in await client.chat.completions.create(**ask, stream=True):
            for delta in event.choices[0].delta.tool_calls or ():
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
        assert (name, arguments) == ("weather", '{"city": "Bern"}')
        history = [
            *HI,
            {"role": "assistant", "tool_calls": [found.model_dump()]},
            {"role": "tool", "tool_call_id": "c7", "content": "rain"},
        ]
        await client.chat.completions.create(**(ask | {"messages": history}))
        shown = bench.router.tokenizer.decode(worker.requests[-1].prompt)
        assert "<tool_call>Bern</tool_call>" in shown
        assert "rainc7" in shown
        answer = await client.chat.completions.create(**ask, tool_choice="none")
        assert answer.choices[0].message.content == f"Well.\n{call}"
        assert "<tools>" not in bench.router.tokenizer.decode(worker.requests[-1].prompt)

    run(directory, test, worker)


def test_a_call_that_must_be_made_is_constrained(directory: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = TOOL_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    texts = ['{"city": "Bern"}', '[{"name": "weather", "parameters": {"city": "Bern"}}]']
    worker = FakeWorker("w", script=lambda _: Script(ids_of(texts[len(worker.requests) - 1])))

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        named = {"type": "function", "function": {"name": "weather"}}
        for choice, end in ((named, "stop"), ("required", "tool_calls")):
            answer = await client.chat.completions.create(
                model=SERVED, messages=HI, tools=TOOLS, tool_choice=choice
            )
            (found,) = answer.choices[0].message.tool_calls
            assert found.function.arguments == '{"city": "Bern"}'
            assert answer.choices[0].finish_reason == end
        schemas = [json.loads(r.sampling.constraint.text) for r in worker.requests]
        assert schemas[0] == TOOLS[0]["function"]["parameters"]
        call = schemas[1]["items"]["anyOf"][0]["properties"]
        assert call["name"] == {"const": "weather"}

    run(directory, test, worker)


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
            'kvferry_kv_slots{account="free",worker="w"} 10000.0',
        ):
            assert line in lines

    run(directory, test, worker)


def test_a_port_in_use_names_its_setting(directory: Path) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        port = int(bench.http_url.rpartition(":")[2])
        metrics = RequestMetrics(bench.router, bench.router._clock)
        with pytest.raises(ConfigError) as caught:
            await serve_http(bench.router, metrics, ("127.0.0.1", port))
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
