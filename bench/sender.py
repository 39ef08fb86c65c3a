"""Sends the chains of one client when the load has them sent, and follows each answer.

An open loop never waits for answers: every chain is a task of its own, and how late it was sent is
seen in the record. Time and sleeping are injected.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bench.answer import Answer, Failure, Refusal
from bench.arrivals import arrival_times
from bench.record import LoadMode, Outcome
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from bench.answer import Endpoint
    from bench.plan import RunPlan
    from bench.workload import Prompt, Workload
    from kvferry.clock import Clock


class Sender:
    """One client's part of a run."""

    def __init__(
        self,
        plan: RunPlan,
        workload: Workload,
        endpoint: Endpoint,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Raises `InvalidInput` for a load that the workload cannot have."""
        self._plan, self._workload, self._endpoint = plan, workload, endpoint
        self._clock, self._sleep = clock, sleep
        self.answers: list[Answer] = []
        """Of all requests that were begun, in that order."""
        self.ended = 0
        self._chains = range(plan.part, len(workload.starts), plan.parts)
        self._offsets_s = self._offsets()

    @property
    def requests(self) -> int:
        """That this client is to send."""
        own = frozenset(self._chains)
        chain_of = self._workload.requests
        starts = {chain_of[start].chain: n for n, start in enumerate(self._workload.starts)}
        return sum(starts[request.chain] in own for request in chain_of)

    async def run(self, start_at: float) -> None:
        """Until every chain has ended. Cancelled: what runs ends as cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._plan.load.mode is LoadMode.CLOSED:
                chains = iter(self._chains)
                for _ in range(self._users()):
                    tasks.create_task(self._user(chains, start_at))
            else:
                await self._plan_of_times(tasks, start_at)

    def _offsets(self) -> list[float]:
        load, workload = self._plan.load, self._workload
        if load.mode is LoadMode.OPEN:
            times_s = arrival_times(load, len(workload.starts), self._plan.seed)
            return [float(time_s) for time_s in times_s]
        if load.mode is LoadMode.CLOSED:
            return []
        times = [workload.requests[start].at_s for start in workload.starts]
        known = [load.time_scale * at_s for at_s in times if at_s is not None]
        if len(known) != len(times):
            raise InvalidInput("load", f"cannot be replay: {workload.name} has no times")
        return known

    def _users(self) -> int:
        """Of a closed loop, this client's part."""
        whole, rest = divmod(self._plan.load.concurrency, self._plan.parts)
        return whole + (self._plan.part < rest)

    async def _plan_of_times(self, tasks: asyncio.TaskGroup, start_at: float) -> None:
        for chain in sorted(self._chains, key=self._offsets_s.__getitem__):
            index = self._workload.starts[chain]
            # Made while there is time for it: a long prompt takes milliseconds.
            prompt = self._workload.prompts.prompt(index)
            scheduled_at = start_at + self._offsets_s[chain]
            await self._wait_until(scheduled_at)
            tasks.create_task(self._chain(index, prompt, scheduled_at))

    async def _user(self, chains: Iterator[int], start_at: float) -> None:
        await self._wait_until(start_at)
        for chain in chains:
            index = self._workload.starts[chain]
            scheduled_at = self._clock.now() + self._plan.load.think_s
            prompt = self._workload.prompts.prompt(index)
            await self._wait_until(scheduled_at)
            await self._chain(index, prompt, scheduled_at)

    async def _chain(self, index: int, prompt: Prompt, scheduled_at: float) -> None:
        """A request and all that follow it, each when its turn comes."""
        ended_at = await self._one(index, prompt, scheduled_at)
        followers = self._workload.requests[index].followers
        if not followers:
            return
        async with asyncio.TaskGroup() as tasks:
            for follower in followers:
                tasks.create_task(self._follower(follower, ended_at))

    async def _follower(self, index: int, ended_at: float) -> None:
        think_s = self._plan.load.time_scale * self._workload.requests[index].think_s
        prompt = self._workload.prompts.prompt(index)
        await self._wait_until(ended_at + think_s)
        await self._chain(index, prompt, ended_at + think_s)

    async def _one(self, index: int, prompt: Prompt, scheduled_at: float) -> float:
        """Returns when it ended. What goes wrong with it is in its answer."""
        request = self._workload.requests[index]
        answer = Answer(self._clock, index, request.session, scheduled_at)
        self.answers.append(answer)
        try:
            async with asyncio.timeout(self._plan.deadline_s):
                await self._endpoint.ask(answer, prompt, request.answer_tokens)
            answer.ends(Outcome.DONE)
        except TimeoutError:
            answer.ends(Outcome.CANCELLED, "deadline")
        except asyncio.CancelledError:
            answer.ends(Outcome.CANCELLED, "interrupted")
            raise
        except Refusal as refusal:
            answer.ends(Outcome.REFUSED, refusal.code)
        except Failure as failure:
            answer.ends(Outcome.FAILED, failure.code)
        self.ended += 1
        assert answer.ended_at is not None
        return answer.ended_at

    async def _wait_until(self, moment: float) -> None:
        left_s = moment - self._clock.now()
        if left_s > 0:
            await self._sleep(left_s)
