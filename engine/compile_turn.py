"""Each kernel is compiled once on a machine: processes that start together take turns.

Numba's own files say nothing until code is compiled, so two processes compile the same for seconds.
A process may also go ahead and compile what another one, which waits for it then, needs later.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numba
from llvmlite import binding
from numba.core.caching import FunctionCache

from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FunctionType

_WAIT_S = 60.0
"""Longer than a kernel takes on a busy machine. After it both compile, which does no harm."""
_LOOK_EVERY_S = 0.02


class CompileTurn:
    """Whose turn it is to compile one function. Its name tells its content (`name_by_content`)."""

    def __init__(self, function: FunctionType, variant: str = "") -> None:
        """`variant`: tells apart functions of the same source."""
        directory = Path(FunctionCache(function).cache_path)  # type: ignore[no-untyped-call]
        self._path = directory / f"{function.__qualname__}{variant}.turn"

    @property
    def is_over(self) -> bool:
        """Whether the function was compiled, by this version of the compiler for this processor."""
        try:
            return self._path.read_text() == _compiler()
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def held(self, *, wait: bool) -> Iterator[bool]:
        """Compile inside if it is True. It is False only if another process does, without `wait`.

        An end without an exception makes the turn over. A process that is killed loses its turn.
        """
        with self._path.open("a+") as file:
            if not _lock(file.fileno(), _WAIT_S if wait else 0.0) and not wait:
                yield False
                return
            yield True
            file.seek(0)
            if file.read() != _compiler():
                file.truncate(0)
                file.write(_compiler())


def _lock(file: int, within_s: float) -> bool:
    clock = MonotonicClock()
    until = clock.now() + within_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.now() >= until:
                return False
            threading.Event().wait(_LOOK_EVERY_S)
        else:
            return True


def _compiler() -> str:
    return f"numba {numba.__version__}, {binding.get_host_cpu_name()}\n"
