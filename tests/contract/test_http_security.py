"""Connections and keys at the HTTP front door, with certificates made for the test."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest

from kvferry.router_config import SecurityConfig
from tests.support.certificates import Authority
from tests.support.fake_worker import FakeWorker
from tests.support.router_bench import SERVED, RouterBench, router_bench

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.support.certificates import Identity

BLUE = "the-key-of-blue-0001"


@pytest.fixture
def keys(tmp_path: Path) -> SecurityConfig:
    file = tmp_path / "keys"
    file.write_text(f"blue: {BLUE}\n")
    return SecurityConfig(api_keys=str(file))


def run(
    directory: Path, security: SecurityConfig, test: Callable[[RouterBench], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(60),
            router_bench(directory, FakeWorker("w"), security=security) as bench,
        ):
            await test(bench)

    asyncio.run(main())


async def status_of(url: str, context: ssl.SSLContext | None = None, **headers: str) -> int:
    connector = aiohttp.TCPConnector(ssl=context if context is not None else True)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(url, headers=headers) as response,
    ):
        await response.read()
        return response.status


def trusting(ca: Path, client: Identity | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if client is not None:
        context.load_cert_chain(client.certificate, client.key)
    return context


def test_the_openai_client_with_and_without_a_key(directory: Path, keys: SecurityConfig) -> None:
    async def test(bench: RouterBench) -> None:
        async def ask(key: str) -> Any:
            url = f"{bench.http_url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                return await client.completions.create(model=SERVED, prompt="hello")

        assert (await ask(BLUE)).choices[0].text == "hello"
        with pytest.raises(openai.AuthenticationError) as caught:
            await ask("the-key-of-nobody-01")
        assert caught.value.status_code == 401
        assert caught.value.type == "invalid_request_error"
        assert caught.value.code == "invalid_api_key"
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        assert "nobody" not in str(caught.value)

    run(directory, keys, test)


def test_probes_need_no_key(directory: Path, keys: SecurityConfig) -> None:
    async def test(bench: RouterBench) -> None:
        for path in ("/health", "/ready", "/metrics", "/openapi.json"):
            assert await status_of(bench.http_url + path) == 200, path
        models = f"{bench.http_url}/v1/models"
        assert await status_of(models) == 401
        assert await status_of(models, **{"X-API-Key": BLUE}) == 200

    run(directory, keys, test)


def test_tls_and_client_certificates(directory: Path, tmp_path: Path) -> None:
    ours, clients = Authority(tmp_path, "ca"), Authority(tmp_path, "clients")
    strangers = Authority(tmp_path, "strangers")
    server = ours.identity("server")
    config = SecurityConfig(str(server.certificate), str(server.key), str(clients.file))
    good, bad = clients.identity("good"), strangers.identity("bad")

    async def test(bench: RouterBench) -> None:
        url = f"{bench.http_url}/v1/models"
        assert await status_of(url, trusting(ours.file, good)) == 200
        refused = (
            trusting(strangers.file, good),
            trusting(ours.file),
            trusting(ours.file, bad),
        )
        for context in refused:
            with pytest.raises(aiohttp.ClientError):
                await status_of(url, context)
        with pytest.raises(aiohttp.ClientError):
            await status_of(url.replace("https", "http"))

    run(directory, config, test)
