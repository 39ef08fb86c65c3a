"""What the HTTP front door does below the API: connections, framing, encodings."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import streams, test_utils, web

from router.api.http_connections import CONNECTIONS_MAX, BoundedSite, connections_max
from router.api.http_errors import HttpRefusal
from router.api.openai_body import CompletionBody
from router.api.openai_service import _read
from tests.support.openai_bench import run, says
from tests.support.router_bench import eventually
from tests.support.router_model import write_model

if TYPE_CHECKING:
    from pathlib import Path

    import openai

    from tests.support.router_bench import RouterBench

PROBE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def ask(address: tuple[str, int]) -> tuple[bytes, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(PROBE)
    return await reader.readuntil(b"}"), writer


def test_connections_are_bounded_and_a_place_that_is_left_is_free() -> None:
    async def main() -> None:
        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await BoundedSite(runner, ("127.0.0.1", 0), None, 2).start()
        address = runner.addresses[0]
        try:
            async with asyncio.timeout(60):
                first, second = [await ask(address), await ask(address)]
                assert b" 200 " in first[0]
                reader, writer = await asyncio.open_connection(*address)
                refusal = await reader.read()
                writer.close()
                head, _, body = refusal.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 ")
                assert f"Content-Length: {len(body)}".encode() in head
                assert b'"message": "connections: ' in body
                first[1].close()
                await eventually(lambda: len(runner.server.connections) == 1)
                again = await ask(address)
                assert b" 200 " in again[0]
                second[1].close()
                again[1].close()
        finally:
            await runner.cleanup()

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({})

    asyncio.run(main())


def test_the_bound_leaves_descriptors_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, bound in ((1024, 512), (10**6, CONNECTIONS_MAX)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connections_max() == bound
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert connections_max() == CONNECTIONS_MAX


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "klingon"])
def test_no_body_is_unpacked(tmp_path: Path, encoding: str) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        async with aiohttp.ClientSession(bench.http_url) as session:
            headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
            data = gzip.compress(b'{"prompt": "a"}')
            async with session.post("/v1/completions", data=data, headers=headers) as response:
                error = (await response.json())["error"]
                assert (response.status, error["message"].split(":")[0]) == (
                    415,
                    "content-encoding",
                )

    run(write_model(tmp_path), test, says("a"))


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/nowhere"])
def test_what_we_cannot_meet_is_refused_as_everything_else(tmp_path: Path, path: str) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        headers = {"Expect": "miracles"}
        async with (
            aiohttp.ClientSession(bench.http_url) as session,
            session.post(path, json={}, headers=headers) as response,
        ):
            assert (response.status, response.content_type) == (417, "application/json")
            error = (await response.json())["error"]
        assert error["message"].startswith("expect: ")
        assert error["type"] == "invalid_request_error"

    run(write_model(tmp_path), test, says("a"))


def test_a_client_that_waits_is_told_to_go_on(tmp_path: Path) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        async with aiohttp.ClientSession(bench.http_url) as session:
            body = {"model": bench.router.config.model.served_name, "prompt": "a"}
            async with session.post("/v1/completions", json=body, expect100=True) as response:
                assert response.status == 200, await response.text()

    run(write_model(tmp_path), test, says("a"))


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
NO_HTTP = {
    b"\x16\x03\x01\x02\x00\x01\x00": 400,
    b"G\x01T / HTTP/1.1\r\n\r\n": 400,
    b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: x\r\nA\x00: b\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: x\r\n" + 200 * b"A: a\r\n" + b"\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: x\r\nA: " + 10_000 * b"a" + b"\r\n\r\n": 431,
    CHUNKED + b"zz\r\n": 400,
}


def test_what_is_no_http_is_answered_as_everything_else(tmp_path: Path) -> None:
    async def test(bench: RouterBench, client: openai.AsyncOpenAI) -> None:
        port = int(bench.http_url.rsplit(":", 1)[1])
        for data, status in NO_HTTP.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert int(head.split()[1]) == status, data
            assert b"Content-Type: application/json" in head
            error = json.loads(body)["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith("request: ")
            assert (error["param"], "\n" in error["message"]) == (None, False)

    run(write_model(tmp_path), test, says("a"))


def test_a_body_that_breaks_off_is_the_clients_fault() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        payload = streams.StreamReader(test_utils.mock.Mock(), 2**16, loop=loop)
        payload.set_exception(web.RequestPayloadError("broken off"))
        headers = {"Content-Type": "application/json"}
        request = test_utils.make_mocked_request("POST", "/", headers=headers, payload=payload)
        with pytest.raises(HttpRefusal, match=r"^body: ") as caught:
            await _read(request, CompletionBody)
        assert caught.value.status == 400

    asyncio.run(main())
