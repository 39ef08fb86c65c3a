"""Lets the constraints of clients pass to workers, once they have been compiled where it is safe.

The grammar library bounds most of what a text can cost. Some texts still cost it minutes, gigabytes
or the stack: an intersection of patterns, a long chain of rules. So each constraint is compiled
once in a process of its own (`router.constraint_child`) with limits of time and memory; one that
ends this process is refused. Workers compile the same text with the same library and limits.

One is compiled at a time, in the same fair order as requests are served: many or expensive ones of
one tenant do not keep those of others waiting. What nobody waits for any more is not compiled.
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
from router.turns import Turns

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Coroutine, Mapping
    from pathlib import Path

    from kvferry.clock import Clock
    from kvferry.sampling import Constraint
    from router.request import ServiceClass

_log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class _Verdict:
    """Of one constraint: None, or what is wrong with it."""

    __slots__ = ("has_begun", "task", "waiting")

    def __init__(self, judge: Callable[[_Verdict], Coroutine[None, None, str | None]]) -> None:
        self.waiting = 0
        """Requests that want to know."""
        self.has_begun = False
        """Whether it is being compiled, or has been."""
        self.task = asyncio.create_task(judge(self))
        self.task.add_done_callback(_seen)


class ConstraintGate:
    """One process for one router, started by the first constraint. On one event loop."""

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        weights: Mapping[ServiceClass, float],
        clock: Clock,
        timeout_s: float = CONSTRAINT_CHECK_TIMEOUT_S,
    ) -> None:
        """`directory` is the model's; `weights` are those of the classes' shares."""
        self._arguments = [str(directory), *map(str, (vocab_size, *eos_token_ids))]
        self._timeout_s = timeout_s
        self._verdicts: OrderedDict[Constraint, _Verdict] = OrderedDict()
        self._turns = Turns(weights, clock)
        self._child: Process | None = None
        self._is_stopped = False

    async def check(
        self, constraint: Constraint | None, service_class: ServiceClass, tenant: str
    ) -> None:
        """Raises `InvalidInput` naming the constraint if no worker is to hear of it; `Overloaded`
        if nobody could tell in time."""
        if constraint is None:
            return
        check_text(constraint)
        verdict = self._verdicts.get(constraint)
        if verdict is None:
            verdict = _Verdict(lambda new: self._judge(constraint, new, service_class, tenant))
            self._verdicts[constraint] = verdict
            if len(self._verdicts) > CONSTRAINT_VERDICTS_KEPT_MAX:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(constraint)
        problem = await self._wait_for(verdict, constraint)
        if problem is not None:
            raise InvalidInput(constraint_field(constraint), problem)

    async def stop(self) -> None:
        """End the process, and with `WorkerUnavailable` whoever waits for it."""
        self._is_stopped = True
        await self._end_child()
        waiting = [each.task for each in self._verdicts.values() if not each.task.done()]
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _wait_for(self, verdict: _Verdict, constraint: Constraint) -> str | None:
        verdict.waiting += 1
        try:
            # A client that leaves does not end what others wait for.
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(verdict.task)
        except TimeoutError:
            raise Overloaded("too many constraints to be checked", _RETRY_AFTER_S) from None
        finally:
            verdict.waiting -= 1
            if verdict.waiting == 0 and not verdict.has_begun:
                self._forget(constraint, verdict)
                verdict.task.cancel()

    async def _judge(
        self, constraint: Constraint, verdict: _Verdict, service_class: ServiceClass, tenant: str
    ) -> str | None:
        """None, or what is wrong with it. Errors are not remembered."""
        async with self._turns.turn(service_class, tenant):
            verdict.has_begun = True
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask(constraint)
            except BaseException:
                # Its answer may still come: nobody could tell it from that to the next question.
                await self._end_child()
                self._forget(constraint, verdict)
                raise

    def _forget(self, constraint: Constraint, verdict: _Verdict) -> None:
        if self._verdicts.get(constraint) is verdict:
            del self._verdicts[constraint]

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
        _log.warning("a constraint ended the process that compiled it")
        # Within the turn of the one that ended it, at the cost of its tenant.
        await self._start()
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


def _seen(task: asyncio.Task[str | None]) -> None:
    """Whoever wanted to know may have left: then nobody else looks at what it ended with."""
    if not task.cancelled():
        task.exception()
