"""The console's page in a real browser: what it shows, its keys, its policy, its cost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.accounts import KvAccounts, WorkerLoad
from kvferry.handoff_view import HandoffView
from kvferry.ids import Attempt, RequestId
from kvferry.membership import Role
from kvferry.router_config import SecurityConfig
from kvferry.tree_view import NodeView, TreeView
from tests.support.chromium import Page, chromium_page, chromium_path
from tests.support.fake_worker import FakeWorker
from tests.support.router_bench import RouterBench, router_bench
from tests.support.router_model import byte_tokenizer, write_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium_path() is None, reason="there is no Chromium on this machine"),
]

NASTY = '<img src=x onerror="document.title=1">'
ADMIN = "the-key-of-admin-001"
WIDTHS = (360, 768, 1440)
VIEWS = ("map", "trees", "handoffs", "requests", "load")


def pair() -> tuple[FakeWorker, FakeWorker]:
    accounts = KvAccounts(40, 30, 10, 15, 5, 100, 8, 2, 64)
    load = WorkerLoad(running=3, waiting=1, handoffs=1)
    prefill = FakeWorker("p", Role.PREFILL, load=load, accounts=accounts)
    decode = FakeWorker("d", Role.DECODE, load=load, accounts=accounts)
    key = (RequestId(NASTY), Attempt(1), prefill.incarnation, decode.incarnation)
    prefill.handoffs = (HandoffView(*key, True, "streaming", 0.5, 100, computed_tokens=60),)
    decode.handoffs = (
        HandoffView(*key, False, "receiving", 0.5, 100, moved_bytes=300, total_bytes=900),
    )
    text = tuple(byte_tokenizer().encode(NASTY).ids)
    nodes = (
        NodeView(1, 0, 0, 16, 1, 5, 9, 2, True, False, 0, "abcd", text),
        NodeView(2, 1, 16, 16, 0, 3, 9, 0, True, False, 0, "", text),
        NodeView(3, 1, 16, 16, 0, 1, 9, 0, False, True, 0, "", text),
    )
    decode.tree = prefill.tree = TreeView((), 0, nodes, 48, 16, True, 1.0)
    return prefill, decode


def run(
    directory: Path,
    test: Callable[[RouterBench, Page], Awaitable[None]],
    *workers: FakeWorker,
    **settings: Any,
) -> None:
    async def main() -> None:
        write_model(directory)
        async with (
            asyncio.timeout(120),
            router_bench(directory, *workers, **settings) as bench,
            chromium_page() as page,
        ):
            await page.look(width=1440)
            await test(bench, page)

    asyncio.run(main())


def test_every_view_at_every_width_without_an_error(tmp_path: Path) -> None:
    async def test(bench: RouterBench, page: Page) -> None:
        await bench.ask("hello", request_id=NASTY, tenant=NASTY)
        await page.goto(f"{bench.http_url}/console/")
        for number, view in enumerate(VIEWS, start=1):
            await page.press(str(number))
            await page.until(f"location.hash === '#/{view}'")
            if view == "trees":
                await page.until("document.querySelector('.head input[type=checkbox]')")
                await page.run("document.querySelector('.head input[type=checkbox]').click()")
                await page.until("document.querySelector('.text')")
            await page.until("document.querySelector('#pulse').dataset.state === 'live'")
            for width in WIDTHS:
                await page.look(width=width, scheme="dark" if width == WIDTHS[0] else "light")
                wide = await page.run("document.documentElement.scrollWidth")
                assert wide <= width, f"{view} is {wide} pixels wide at {width}"
        assert not await page.run("document.querySelector('img[src=x]') !== null")
        assert page.problems == []
        assert all(url.startswith(bench.http_url) for url in page.requests)

    run(tmp_path, test, *pair())


def test_a_tree_by_keyboard(tmp_path: Path) -> None:
    async def test(bench: RouterBench, page: Page) -> None:
        await page.goto(f"{bench.http_url}/console/#/trees/d")
        await page.until("document.querySelectorAll('.node').length === 3")
        await page.run("document.querySelector('.node[tabindex=\"0\"]').focus()")
        focused = "document.activeElement.dataset.id"
        assert await page.run(focused) == "1"
        for key, node in (("ArrowRight", "2"), ("ArrowDown", "3"), ("ArrowLeft", "1")):
            await page.press(key)
            assert await page.run(focused) == node
        await page.press("Enter")
        await page.until("location.hash === '#/trees/d/1'")
        assert page.problems == []

    run(tmp_path, test, *pair())


def test_a_dead_worker_is_seen_and_a_paused_page_asks_nothing(tmp_path: Path) -> None:
    prefill, decode = pair()

    async def test(bench: RouterBench, page: Page) -> None:
        await page.goto(f"{bench.http_url}/console/")
        await page.until("document.querySelector('[data-id=d][data-state=busy]')")
        decode.status_fails = True
        await page.until("document.querySelector('[data-id=d][data-state=silent]')")
        await bench.members(prefill.info)
        await page.until("document.querySelector('[data-id=d][data-state=gone]')")
        await page.press("p")
        await page.until("document.querySelector('#pulse').dataset.state === 'paused'")
        await asyncio.sleep(0.5)
        before = len(page.requests)
        await asyncio.sleep(2.5)
        assert len(page.requests) == before

    run(tmp_path, test, prefill, decode)


def test_the_page_asks_for_the_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"admin: {ADMIN}\n")

    async def test(bench: RouterBench, page: Page) -> None:
        await page.goto(f"{bench.http_url}/console/")
        await page.until("document.querySelector('dialog[open] #console-key')")
        await page.press(*ADMIN, "Enter")
        await page.until("document.querySelectorAll('.worker').length === 2")
        kept = await page.run("JSON.stringify(localStorage) + document.cookie + location.href")
        assert ADMIN not in kept

    run(tmp_path, test, *pair(), security=SecurityConfig(api_keys=str(file)))
