"""An event loop that does not wait: when nothing is ready, its time jumps to the next timer.

So a test may let minutes pass, and how busy the machine is changes nothing. For what uses no other
threads: the loop does not know that one is about to call it.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


class _Jumping(selectors.DefaultSelector):
    """Adds up the waits that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout if timeout is None else 0)
        if not ready and timeout is not None:
            self.passed_s += timeout
        return ready


class AutojumpLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.passed_s


class LoopClock:
    """The time of the running loop, as a `kvferry.clock.Clock`."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def run_jumping(main: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`, with an `AutojumpLoop`."""
    with asyncio.Runner(loop_factory=AutojumpLoop) as runner:
        runner.run(main)
