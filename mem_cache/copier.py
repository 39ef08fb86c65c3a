"""Copies between tiers that run beside the engine thread.

A copy reads and writes memory that nobody else touches meanwhile; its tier sees to that. The
copier only runs it, and tells how it ended.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvferry.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

COPY_TIMEOUT_S = 10.0
"""Longest wait for a copy that has begun. Its pieces are some MiB: milliseconds."""
STOP_TIMEOUT_S = 10.0


def _no_work(copy: Copy) -> None:
    """Work that is still to be set."""


@dataclass(slots=True, eq=False)
class Copy:
    """One copy: what to run, and whether somebody still wants it."""

    is_urgent: bool
    """A request waits for it: before all that are not urgent."""
    work: Callable[[Copy], None] = _no_work
    """Runs in any one thread. Looks at `is_cancelled` every few milliseconds. May raise."""
    is_cancelled: bool = False

    def run(self) -> Exception | None:
        """Do the work; returns what it failed with."""
        try:
            self.work(self)
        except Exception as error:  # noqa: BLE001 - outermost frame: its tier is told the reason
            return error
        return None


@dataclass(frozen=True, slots=True)
class CopyEnd:
    """A copy that ran, and what it failed with."""

    copy: Copy
    error: Exception | None


class Copier(Protocol):
    """Runs copies one after the other. All methods are the engine thread's.

    `submit` once per copy; then it ends in one of three ways: `take_done` reports it, or `finish`
    does, or `cancel` made it void.
    """

    on_done: Callable[[], None]
    """Called, from the copier's thread, when `take_done` has something new."""

    def submit(self, copy: Copy) -> None:
        """Run it some time: urgent ones first, otherwise in order."""
        ...

    def take_done(self) -> list[CopyEnd]:
        """Copies that ended since the last call, in order."""
        ...

    def finish(self, copy: Copy) -> Exception | None:
        """Have it done now: run here if it has not begun, else waited for."""
        ...

    def cancel(self, copy: Copy) -> None:
        """Afterwards it touches no memory, and is not reported."""
        ...

    def close(self) -> None:
        """End; what has not begun never will."""
        ...


class ThreadCopier:
    """One daemon thread. Array copies release the interpreter's lock, so the engine goes on."""

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._urgent: deque[Copy] = deque()
        self._others: deque[Copy] = deque()
        self._done: dict[Copy, Exception | None] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-copier", daemon=True)
        self._thread.start()

    def submit(self, copy: Copy) -> None:
        """Run it some time: urgent ones first, otherwise in order."""
        with self._changed:
            (self._urgent if copy.is_urgent else self._others).append(copy)
            self._changed.notify_all()

    def take_done(self) -> list[CopyEnd]:
        """Copies that ended since the last call, in order."""
        with self._changed:
            done = [CopyEnd(copy, error) for copy, error in self._done.items()]
            self._done.clear()
        return done

    def finish(self, copy: Copy) -> Exception | None:
        """Have it done now. Raises `InternalError` if a copy that has begun does not end."""
        return copy.run() if self._withdraw(copy) else self._await(copy)

    def cancel(self, copy: Copy) -> None:
        """Afterwards it touches no memory. Raises `InternalError` if it does not end."""
        copy.is_cancelled = True
        if not self._withdraw(copy):
            self._await(copy)

    def close(self) -> None:
        """End the thread after the copy it is at."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise InternalError(f"a copy of KV still runs after {STOP_TIMEOUT_S} s")

    def _withdraw(self, copy: Copy) -> bool:
        """Take it back; False if it has begun."""
        queue = self._urgent if copy.is_urgent else self._others
        with self._changed:
            if copy not in queue:
                return False
            queue.remove(copy)
            return True

    def _await(self, copy: Copy) -> Exception | None:
        with self._changed:
            if not self._changed.wait_for(lambda: copy in self._done, COPY_TIMEOUT_S):
                raise InternalError(f"a copy of KV still runs after {COPY_TIMEOUT_S} s")
            return self._done.pop(copy)

    def _run(self) -> None:
        while (copy := self._next()) is not None:
            error = copy.run()
            with self._changed:
                self._done[copy] = error
                self._changed.notify_all()
            self.on_done()

    def _next(self) -> Copy | None:
        """The copy to run now; waits for one. None when closing."""
        with self._changed:
            # Without a deadline: an idle thread waits for work, nobody waits for it.
            self._changed.wait_for(lambda: self._is_closing or self._urgent or self._others)
            if self._is_closing:
                return None
            return (self._urgent or self._others).popleft()
