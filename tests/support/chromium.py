"""A headless Chromium, driven over its DevTools protocol: no driver and no library of its own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.support.waiting import HANG_GUARD_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, and load what we wrote
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "about:blank",
)
_POLL_S = 0.02
_KEYS = {"Enter": 13, "Tab": 9, "Backspace": 8, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38}
_KEYS |= {"ArrowRight": 39, "ArrowDown": 40}


def chromium_path() -> str | None:
    """The program; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. What goes wrong in it is gathered in `problems`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []
        """Errors of scripts, of the console, and violations of the page's policy."""
        self.requests: list[str] = []
        """Addresses that were asked for."""

    async def listen(self) -> None:
        """To be run beside all else."""
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
            else:
                self._note(data["method"], data["params"])

    def _note(self, method: str, params: Any) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", str(details)))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.problems.append(f"{entry['text']} {entry.get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str(params["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> Any:
        """One command of the protocol; fails with the browser's own words."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(HANG_GUARD_S):
            data = await answer
        assert "error" not in data, f"{method}: {data['error']}"
        return data["result"]

    async def begin(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def goto(self, url: str) -> None:
        """Load it; what is drawn by scripts comes later."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression."""
        result = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    async def until(self, condition: str, within_s: float = HANG_GUARD_S) -> None:
        """Wait until an expression is true; fails with the page's text if it does not become so."""
        try:
            async with asyncio.timeout(within_s):
                while not await self.run(f"Boolean({condition})"):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(
                f"{condition} did not become true; the page says:\n{text}"
            ) from None

    async def press(self, *keys: str) -> None:
        """One after the other, with what each does by default."""
        for key in keys:
            fields: dict[str, Any] = {"key": key}
            if key in _KEYS:
                fields |= {"windowsVirtualKeyCode": _KEYS[key], "code": key}
            if len(key) == 1 or key == "Enter":
                fields["text"] = "\r" if key == "Enter" else key
            await self.call("Input.dispatchKeyEvent", type="keyDown", **fields)
            await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def look(self, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """The size of the window in pixels, and what the system prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def picture(self, *, whole: bool = False) -> bytes:
        """What is seen, or the whole page, as PNG."""
        result = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(result["data"])


@contextlib.asynccontextmanager
async def chromium_page() -> AsyncIterator[Page]:
    """A fresh browser with one tab; both are gone at the end."""
    program = chromium_path()
    assert program is not None, "there is no Chromium"
    with tempfile.TemporaryDirectory() as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--user-data-dir={profile}",
            *_FLAGS,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
            start_new_session=True,
        )
        try:
            port = await _port_of(Path(profile), process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    (tab,) = [each for each in await response.json() if each["type"] == "page"]
                async with session.ws_connect(
                    tab["webSocketDebuggerUrl"], max_msg_size=0, heartbeat=None
                ) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    await page.begin()
                    yield page
                    listening.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()
            # Its children write to the profile until they are gone.
            await asyncio.sleep(0.2)


async def _port_of(profile: Path, process: asyncio.subprocess.Process) -> int:
    file = profile / "DevToolsActivePort"
    async with asyncio.timeout(HANG_GUARD_S):
        while not file.exists() or not file.read_text():
            assert process.returncode is None, "Chromium ended at once"
            await asyncio.sleep(_POLL_S)
    return int(file.read_text().splitlines()[0])
