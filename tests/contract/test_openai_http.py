"""The OpenAI API with the official client: answers, streams, parameters, tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc.aio
import openai
import pytest

from kvferry.cache_key import CacheUse, Sharing
from kvferry.generation import AttemptUsage, FinishReason
from kvferry.grammar import GrammarCompiler
from kvferry.rpc.v1 import inference_pb2
from kvferry.sampling import Constraint, ConstraintKind
from tests.support.fake_worker import FakeWorker, Script
from tests.support.openai_bench import HI, TOOL_TEMPLATE, TOOLS, ids_of, run, says
from tests.support.router_bench import SERVED, RouterBench
from tests.support.router_model import extra_key

if TYPE_CHECKING:
    from pathlib import Path


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
        for name in ("other", " \n0", "a/b"):
            with pytest.raises(openai.NotFoundError) as caught:
                await client.models.retrieve(name)
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


def test_schemas_of_tools_refer_to_their_own_parts(directory: Path) -> None:
    """As those do that libraries derive from types."""
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = TOOL_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"place": {"$ref": "#/$defs/Place"}},
                    "$defs": {"Place": {"type": kind}},
                },
            },
        }
        for name, kind in (("weather", "string"), ("height", "integer"))
    ]
    text = '[{"name": "height", "parameters": {"place": 7}}]'
    compiler = GrammarCompiler(directory, 264, (257,))

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(
            model=SERVED, messages=HI, tools=tools, tool_choice="required"
        )
        assert answer.choices[0].message.tool_calls[0].function.name == "height"
        constraint = worker.requests[0].sampling.constraint
        for said, is_allowed in ((text, True), (text.replace("7", '"7"'), False)):
            matcher = compiler.compile(constraint).result().matcher()
            ids = ids_of(said)
            assert (matcher.try_consume_tokens(list(ids)) == len(ids)) is is_allowed

    worker = says(text)
    run(directory, test, worker)
    compiler.close()


def test_options_of_the_chat_template(directory: Path) -> None:
    """Over HTTP and over gRPC."""
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0].content }}{% if not think %} /no{% endif %}"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    worker = says("a")

    async def ask_grpc(bench: RouterBench, options: str) -> None:
        chat = inference_pb2.Chat(messages=HI, template_options=options)
        async for _ in bench.inference.Generate(inference_pb2.GenerateRequest(chat=chat)):
            pass

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        for think, shown in ((True, "hi"), (False, "hi /no")):
            options = {"think": think, "unknown": 1}
            await client.chat.completions.create(
                model=SERVED, messages=HI, extra_body={"chat_template_kwargs": options}
            )
            await ask_grpc(bench, json.dumps(options))
            for request in worker.requests[-2:]:
                assert bench.router.tokenizer.decode(request.prompt) == shown
        await ask_grpc(bench, "")
        assert bench.router.tokenizer.decode(worker.requests[-1].prompt) == "hi /no"
        with pytest.raises(grpc.aio.AioRpcError, match=r"chat.template_options.messages") as caught:
            await ask_grpc(bench, '{"messages": []}')
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(worker.requests) == 5

    run(directory, test, worker)


def test_a_trace_goes_on_and_a_header_that_is_none_refuses_nothing(directory: Path) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        for header in (f"00-{trace_id}-b7ad6b7169203331-00", "no trace"):
            await client.chat.completions.create(
                model=SERVED, messages=HI, extra_headers={"traceparent": header}
            )
        other, known = bench.router.log.recent(2)
        assert (known.trace.trace_id, known.trace.is_sampled) == (trace_id, False)
        assert (known.parent.span_id, other.parent) == ("b7ad6b7169203331", None)

    run(directory, test, says("hello"))
