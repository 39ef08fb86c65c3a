"""Adapters as models at the front doors: what is listed, who is asked, and for what KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import openai
import pytest

from kvferry.adapter_files import adapter_identities
from kvferry.errors import ConfigError
from kvferry.ids import NO_ADAPTER, AdapterId
from kvferry.limits import ADAPTERS_MAX
from kvferry.rpc.v1 import inference_pb2
from router.served_models import ServedModels
from tests.support.fake_worker import FakeWorker, Script
from tests.support.openai_bench import HI, ids_of, run, says
from tests.support.router_bench import SERVED, RouterBench

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "an answer"


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, str]:
    """Two directories: a router looks into none of their files."""
    folders: dict[str, str] = {}
    for name in ("sql", "org/chat"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text(name)
        folders[name] = str(folder)
    return folders


def test_adapters_are_listed_as_models(directory: Path, adapters: dict[str, str]) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        listed: list[Any] = [model async for model in client.models.list()]
        assert [(model.id, model.parent) for model in listed] == [
            (SERVED, None),
            ("sql", SERVED),
            ("org/chat", SERVED),
        ]
        one: Any = await client.models.retrieve("org/chat")
        assert (one.id, one.parent) == ("org/chat", SERVED)
        info = await bench.inference.ModelInfo(inference_pb2.ModelInfoRequest())
        assert (info.model, list(info.adapters)) == (SERVED, ["sql", "org/chat"])

    run(directory, test, says("a"), adapters=adapters)


def test_a_worker_is_told_which_adapter(directory: Path, adapters: dict[str, str]) -> None:
    """By its files; and the KV of each is apart, of the same prompt and salt."""
    worker, known = says(TEXT), adapter_identities(adapters)

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        for name in ("sql", "org/chat", SERVED):
            chat = await client.chat.completions.create(model=name, messages=HI)
            assert chat.model == name
            text = await client.completions.create(model=name, prompt="hi", stream=True)
            assert {event.model async for event in text} == {name}
            await bench.ask("hi", model=name)
        await bench.ask("hi")
        asked = [request.cache_use.adapter for request in worker.requests]
        one, two = known["sql"], known["org/chat"]
        assert asked == [one] * 3 + [two] * 3 + [NO_ADAPTER] * 4
        keys = {
            request.cache_use.extra_key: request.cache_use.adapter for request in worker.requests
        }
        assert sorted(keys.values()) == sorted({one, two, NO_ADAPTER})

    run(directory, test, worker, adapters=adapters)


def test_an_answer_goes_on_with_its_adapter(directory: Path, adapters: dict[str, str]) -> None:
    def script(request: Any) -> Script:
        return Script(ids_of(TEXT), fail_after=3 if request.id.attempt == 1 else None)

    workers = [FakeWorker(name, script=script) for name in ("w1", "w2")]

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(model="sql", prompt="hi")
        assert answer.choices[0].text == TEXT
        attempts = [request for worker in workers for request in worker.requests]
        uses = [attempt.cache_use for attempt in attempts]
        assert len(uses) == 2
        assert uses[0] == uses[1]
        assert uses[0].adapter == adapter_identities(adapters)["sql"]

    run(directory, test, *workers, adapters=adapters)


def test_a_name_that_is_no_adapter_is_not_found(directory: Path, adapters: dict[str, str]) -> None:
    worker = says("a")

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        for call in (
            client.chat.completions.create(model="mine", messages=HI),
            client.completions.create(model="mine", prompt="hi"),
            client.models.retrieve("mine"),
        ):
            with pytest.raises(openai.NotFoundError, match="'sql'") as caught:
                await call
            assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await bench.ask("hi", model="mine")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert worker.requests == []

    run(directory, test, worker, adapters=adapters)


def test_a_client_is_told_of_many_long_names_as_far_as_grpc_carries(directory: Path) -> None:
    names = {f"{number:02d}{'🚢' * 126}": AdapterId(str(number)) for number in range(ADAPTERS_MAX)}

    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        bench.router.models = ServedModels(SERVED, names)
        with pytest.raises(grpc.aio.AioRpcError, match=r"'00🚢+.*65 models") as refused:
            await bench.ask("hi", model="🛳" * 1000)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        (last,) = [name for name in names if name.startswith("63")]
        await bench.ask("hi", model=last)

    run(directory, test, says("a"))


def test_a_router_does_not_start_without_an_adapters_files(
    directory: Path, adapters: dict[str, str]
) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        raise AssertionError("it has started")

    with pytest.raises(ConfigError, match="cannot read") as caught:
        run(directory, test, adapters=adapters | {"gone": "/nowhere"})
    assert caught.value.field == "model.adapters.gone"
