"""The report in a real browser: every width, both schemes, no request, runs hidden by keys."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bench.report import write_report
from tests.support.chromium import chromium_page, chromium_path
from tests.support.run_records import queued_run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium_path() is None, reason="there is no Chromium on this machine"),
]

NASTY = '</title><img src=x onerror="document.title=1">'


def test_it_fits_every_screen_and_hides_runs_by_keyboard(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    runs = [queued_run(seed=1, count=200, name=name) for name in ("first", NASTY)]
    write_report(runs, file)

    async def main() -> None:
        async with asyncio.timeout(120), chromium_page() as page:
            for width, scheme in ((360, "dark"), (768, "light"), (1440, "dark")):
                await page.look(width=width, scheme=scheme)
                await page.goto(file.as_uri())
                wide = await page.run("document.documentElement.scrollWidth")
                assert wide <= width, f"{wide} pixels wide at {width}"
            assert await page.run("document.querySelector('img') === null")
            shown = "getComputedStyle(document.querySelector('#cdf-ttft path.run1')).display"
            assert await page.run(shown) != "none"
            await page.run("document.querySelector('#show1').focus()")
            await page.press(" ")
            await page.until(f"{shown} === 'none'")
            dark = await page.run("getComputedStyle(document.body).backgroundColor")
            assert dark == "rgb(11, 18, 22)"
            assert page.problems == []
            assert set(page.requests) == {file.as_uri()}

    asyncio.run(main())
