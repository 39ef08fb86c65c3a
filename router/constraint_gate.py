"""Lets the constraints of clients pass to workers, once they have been compiled where it is safe.

The grammar library bounds most of what a text can cost. Some texts still cost it minutes, gigabytes
or the stack: an intersection of patterns, a long chain of rules. So each constraint is compiled
once in a process of its own (`router.constraint_child`) with limits of time and memory; one that
ends this process is refused. Workers compile the same text with the same library and limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvferry.errors import InternalError, InvalidInput, Overloaded, WorkerUnavailable
from kvferry.grammar import check_text, constraint_field
from kvferry.limits import (
    CONSTRAINT_CHECK_TIMEOUT_S,
    CONSTRAINT_COMPILE_CPU_S_MAX,
    CONSTRAINT_VERDICTS_KEPT_MAX,
)
from router.constraint_child import READY

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from pathlib import Path

    from kvferry.sampling import Constraint

_log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class ConstraintGate:
    """One process for one router, started by the first constraint. On one event loop."""

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        timeout_s: float = CONSTRAINT_CHECK_TIMEOUT_S,
    ) -> None:
        """`directory` is the model's."""
        self._arguments = [str(directory), *map(str, (vocab_size, *eos_token_ids))]
        self._timeout_s = timeout_s
        self._verdicts: OrderedDict[Constraint, asyncio.Task[str | None]] = OrderedDict()
        self._turn = asyncio.Lock()
        self._child: Process | None = None
        self._is_stopped = False

    async def check(self, constraint: Constraint | None) -> None:
        """Raises `InvalidInput` naming the constraint if no worker is to hear of it; `Overloaded`
        if nobody could tell in time."""
        if constraint is None:
            return
        check_text(constraint)
        verdict = self._verdicts.get(constraint)
        if verdict is None:
            verdict = self._verdicts[constraint] = asyncio.create_task(self._judge(constraint))
            if len(self._verdicts) > CONSTRAINT_VERDICTS_KEPT_MAX:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(constraint)
        # A client that leaves does not end what others may wait for.
        try:
            problem = await asyncio.wait_for(asyncio.shield(verdict), self._timeout_s)
        except TimeoutError:
            raise Overloaded("too many constraints to be checked", _RETRY_AFTER_S) from None
        if problem is not None:
            raise InvalidInput(constraint_field(constraint), problem)

    async def stop(self) -> None:
        """End the process, and with `WorkerUnavailable` whoever waits for it."""
        self._is_stopped = True
        await self._end_child()
        waiting = [verdict for verdict in self._verdicts.values() if not verdict.done()]
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _judge(self, constraint: Constraint) -> str | None:
        """None, or what is wrong with it. Errors are not remembered."""
        try:
            async with self._turn, asyncio.timeout(self._timeout_s):
                return await self._ask(constraint)
        except BaseException:
            # Its answer may still come: nobody could tell it from that to the next question.
            await self._end_child()
            self._verdicts.pop(constraint, None)
            raise

    async def _ask(self, constraint: Constraint) -> str | None:
        child = self._child or await self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        question = json.dumps([constraint.kind.value, constraint.text]).encode() + b"\n"
        with contextlib.suppress(ConnectionError):
            child.stdin.write(question)
            await child.stdin.drain()
        answer = await child.stdout.readline()
        if answer:
            problem: str | None = json.loads(answer)
            return problem
        await self._end_child()
        self._require_running()
        _log.warning("a constraint ended the process that compiled it")
        seconds = f"{CONSTRAINT_COMPILE_CPU_S_MAX:g} s"
        return f"is too complex: it cannot be compiled in {seconds} and the memory for it"

    async def _start(self) -> Process:
        self._require_running()
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "router.constraint_child", *self._arguments]
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self._child = child
        # It may have been stopped meanwhile.
        self._require_running()
        assert child.stdout is not None
        answer = await child.stdout.readline()
        self._require_running()
        if json.loads(answer or "null") != READY:
            raise InternalError("the process that checks constraints does not start")
        return child

    def _require_running(self) -> None:
        if self._is_stopped:
            raise WorkerUnavailable("the router is shutting down")

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
