"""Signals that end a command, turned into `KeyboardInterrupt` so that every `finally` runs."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_on_signals() -> AbstractContextManager[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does. Main thread only.

    SIGINT is set as well: a shell starts background jobs with it ignored.
    """

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    return _handled_by(interrupt)


def ignore_signals() -> AbstractContextManager[None]:
    """A second Ctrl-C while a cluster is stopped would leave processes. Main thread only."""
    return _handled_by(signal.SIG_IGN)


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, object], None] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
