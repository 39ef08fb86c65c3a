"""The official client against a prefill and a decode worker with the real model."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import openai
import pytest

from kvferry.config import load_config
from kvferry.membership import Role
from router.api.http_server import serve_http
from tests.support.in_process_cluster import InProcessCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = {
    "cache.memory_bytes": str(128 * 2**20),
    "model.context_length": "1024",
    "cache.audit": "true",
}
MODEL = "SmolLM2-135M-Instruct"
ASKED = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    config = load_config(None, {}, SETTINGS)
    with InProcessCluster(config, (Role.PREFILL, Role.DECODE)) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: InProcessCluster) -> Iterator[openai.OpenAI]:
    door, port = cluster._run(serve_http(cluster.doors, ("127.0.0.1", 0)))
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as made:
        yield made
    cluster._run(door.stop(1.0))


def test_a_conversation_and_where_its_prompt_came_from(
    cluster: InProcessCluster, client: openai.OpenAI
) -> None:
    ask = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 8}
    first = client.chat.completions.create(**ask)
    assert "Paris" in (first.choices[0].message.content or "")
    cluster.wait_idle()
    events = list(
        client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert text == first.choices[0].message.content
    usage = events[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    # Whole pages of the prompt; its last token is always computed.
    cached = usage.prompt_tokens_details.cached_tokens or 0
    assert cached % 16 == 0
    assert 16 <= usage.prompt_tokens - 16 <= cached < usage.prompt_tokens
    salted = client.chat.completions.create(**ask, extra_body={"cache_salt": "mine"})
    assert salted.usage is not None
    assert salted.usage.prompt_tokens_details is not None
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    cluster.wait_idle()


def test_an_answer_keeps_to_its_schema(cluster: InProcessCluster, client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Bern"]}, "sure": {"type": "boolean"}},
        "required": ["city", "sure"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        temperature=0,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    said = json.loads(answer.choices[0].message.content or "")
    assert said["city"] in ("Paris", "Bern")
    assert isinstance(said["sure"], bool)
    cluster.wait_idle()


@pytest.mark.slow
def test_many_at_once_say_what_each_says_alone(
    cluster: InProcessCluster, client: openai.OpenAI
) -> None:
    prompts = [f"The number after {number} is" for number in range(6)]

    def ask(prompt: str) -> str:
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=6)
        return answer.choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, prompts)) == alone
    together = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=6)
    assert [choice.text for choice in together.choices] == alone
    cluster.wait_idle()
