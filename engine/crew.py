"""Threads that share the work of a step: whoever is awake takes the next part.

The engine thread divides a product into parts, takes them one after the other, and so do the crew's
other threads. Nobody is assigned a part, so a thread that does not get its core costs nothing but
the part it is in. A thread that finds no work looks again for some tens of microseconds, which is
how long the next work of a step takes to come, then sleeps until it is woken.

How a part is claimed: `_TICKET` holds the number of parts in its upper half and the next part in
its lower one, so that one atomic addition both claims a part and says whether there was one left.
Who has claimed a part may read `_TASK` and `_ARGUMENTS`, which stay until `_DONE` says that it is
done.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

from engine.native_math import I64, kernel
from engine.native_memory import (
    add,
    address_of,
    call,
    exchange,
    library_function,
    load,
    put_words,
    store,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LINE = 64
"""Bytes of a cache line: words that different threads write lie on different ones."""
_TICKET = 0 * _LINE
_DONE = 1 * _LINE
"""Parts done by the others."""
_ASLEEP = 2 * _LINE
"""Threads that sleep or are about to."""
_WAITING = 3 * _LINE
"""1: the engine thread sleeps, or is about to, until the others are done."""
_TASK = 4 * _LINE
_ARGUMENTS = _TASK + 8
_THREADS = _TASK + 16
_STOPPED = _TASK + 24
_WORK_SEMAPHORE = 5 * _LINE
_DONE_SEMAPHORE = 6 * _LINE
_BOARD_BYTES = 7 * _LINE

_HALF = 32
_NEXT = (1 << _HALF) - 1
_WORDS = 11
"""At most of `share_words`: one kernel, so all calls pass as many."""
_PADDING = [(0,) * (_WORDS - count) for count in range(_WORDS + 1)]
_LOOKS_MAX = 20_000
"""How often a thread looks for work before it sleeps: about 50 us."""

# POSIX semaphores. A wait may also end because of a signal: whoever waited looks again. It has no
# deadline because what it waits for cannot fail: another thread's loop over numbers.
_semaphore_init = library_function("sem_init", types.int32(types.intp, types.int32, types.uint32))
_semaphore_post = library_function("sem_post", types.int32(types.intp))
_semaphore_wait = library_function("sem_wait", types.int32(types.intp))


@kernel
def share(board: int, task: int, arguments: I64, parts: int) -> None:
    """Call `task(address of arguments, index)` for every index below `parts`; wait for all.

    `board`, `task`: addresses, see `Crew.board` and `native_math.task`. From one thread at a time.
    """
    address = address_of(arguments)
    if parts == 1 or load(board + _THREADS) == 1:
        for index in range(parts):
            call(task, address, index)
        return
    store(board + _TASK, task)
    store(board + _ARGUMENTS, address)
    store(board + _DONE, 0)
    store(board + _TICKET, parts << _HALF)
    for _ in range(exchange(board + _ASLEEP, 0)):
        _semaphore_post(board + _WORK_SEMAPHORE)
    mine = 0
    index = add(board + _TICKET, 1) & _NEXT
    while index < parts:
        call(task, address, index)
        mine += 1
        index = add(board + _TICKET, 1) & _NEXT
    _await_others(board, parts - mine)


@kernel
def _share_words(  # noqa: PLR0913
    board: int, task: int, parts: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int,
    h: int, i: int, j: int, k: int,
) -> None:  # fmt: skip
    arguments = np.empty(_WORDS, dtype=np.int64)
    address = address_of(arguments)
    put_words(address, (a, b, c, d, e, f, g, h, i, j, k))
    share(board, task, arguments, parts)


def share_words(board: int, task: int, parts: int, *words: int) -> None:
    """As `share`, of a few arguments: an array of them would cost more to make than to pass on."""
    _share_words(board, task, parts, *words, *_PADDING[len(words)])


@kernel
def _await_others(board: int, parts: int) -> None:
    looks = 0
    while load(board + _DONE) < parts:
        looks += 1
        if looks > _LOOKS_MAX:
            store(board + _WAITING, 1)
            if load(board + _DONE) < parts:
                _semaphore_wait(board + _DONE_SEMAPHORE)
            store(board + _WAITING, 0)


@kernel
def _has_work(board: int) -> Any:
    ticket = load(board + _TICKET)
    return (ticket & _NEXT) < (ticket >> _HALF)


@kernel
def _serve(board: int) -> None:
    """Take parts until the crew is stopped."""
    looks = 0
    while load(board + _STOPPED) == 0:
        if _has_work(board):
            looks = 0
            ticket = add(board + _TICKET, 1)
            # Another thread may have taken the last part meanwhile.
            if (ticket & _NEXT) < (ticket >> _HALF):
                call(load(board + _TASK), load(board + _ARGUMENTS), ticket & _NEXT)
                add(board + _DONE, 1)
                if load(board + _WAITING) == 1:
                    _semaphore_post(board + _DONE_SEMAPHORE)
            continue
        looks += 1
        if looks > _LOOKS_MAX:
            looks = 0
            add(board + _ASLEEP, 1)
            # What was published before it could be seen that this thread sleeps, wakes nobody.
            if not _has_work(board) and load(board + _STOPPED) == 0:
                _semaphore_wait(board + _WORK_SEMAPHORE)


@kernel
def _prepare(board: int, threads: int) -> None:
    store(board + _THREADS, threads)
    _semaphore_init(board + _WORK_SEMAPHORE, 0, 0)
    _semaphore_init(board + _DONE_SEMAPHORE, 0, 0)


@kernel
def _stop(board: int, others: int) -> None:
    store(board + _STOPPED, 1)
    for _ in range(others):
        _semaphore_post(board + _WORK_SEMAPHORE)


class Crew:
    """The engine thread and `threads - 1` others. The engine thread alone calls `share`."""

    board: int
    """The address that `share` takes."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1, "the engine thread itself"
        self._memory = np.zeros(_BOARD_BYTES + _LINE, dtype=np.uint8)
        address = self._memory.ctypes.data
        self.board = address + -address % _LINE
        _prepare(self.board, threads)
        self._others = [
            threading.Thread(
                target=_serve_board, args=(self._memory, self.board), name="crew", daemon=True
            )
            for _ in range(threads - 1)
        ]
        for thread in self._others:
            thread.start()

    def close(self) -> None:
        """End the other threads, when nothing is being shared. From any thread; idempotent."""
        _stop(self.board, len(self._others))
        for thread in self._others:
            thread.join()


def _serve_board(memory: NDArray[np.uint8], board: int) -> None:
    """`memory`: what the board lies in, so that it lasts as long as this thread."""
    assert memory.ctypes.data <= board
    _serve(board)
