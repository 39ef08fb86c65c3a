"""Runs a planner beside the router that it looks at, and carries out what it decides.

One look each `planner.interval_s`. A look that fails is logged, and the next one comes all the
same. After an order that the supervisor refuses the planner sees what became of it, and decides
anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.planner import AddWorker, Decision, Plan, Planner, RemoveWorker, SwitchRole
from cluster.planner_capacity import Targets
from cluster.planner_input import Observation
from cluster.planner_traffic import TrafficMeter, WorkerMeter
from cluster.planner_wire import plan_to_wire
from kvferry.errors import KvferryError
from kvferry.limits import PLANS_KEPT_MAX, WORKER_START_TIMEOUT_S
from kvferry.planner_config import PlannerMode
from kvferry.rpc.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvferry.clock import Clock
    from kvferry.config import ClusterConfig
    from router.cluster_control import ClusterControl
    from router.router import Router

_log = logging.getLogger(__name__)

_ORDER_TIMEOUT_S = 10.0
"""For the supervisor to take an order; a worker that is taken out has its drain besides."""


@dataclass(slots=True, eq=False)
class PlanEntry:
    """One look, and what became of its decisions."""

    plan: Plan
    outcomes: list[str] = field(default_factory=list)
    """One per decision."""


class PlannerLoop:
    """The planner of one router. Create and use it on the router's event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        router: Router,
        control: ClusterControl,
        clock: Clock,
        ask_resources: Callable[[int], None],
    ) -> None:
        """`ask_resources` tells whoever has machines for how many workers they shall do."""
        planner = config.planner
        self._config = config
        self._router = router
        self._control = control
        self._clock = clock
        self._ask_resources = ask_resources
        targets = Targets(planner.ttft_s, planner.itl_ms / 1000.0, planner.attainment)
        self._planner = Planner(planner)
        self._traffic = TrafficMeter(router.log, targets, clock.now())
        self._workers = WorkerMeter()
        self._entries: deque[PlanEntry] = deque(maxlen=PLANS_KEPT_MAX)
        self._starting: dict[str, float] = {}
        """Workers that were added and are not there yet, and until when they are waited for."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to look."""
        self._spawn(self._run())

    async def stop(self) -> None:
        """Look no more. What has been ordered goes on."""
        self._traffic.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def entries(self) -> tuple[PlanEntry, ...]:
        """What is remembered, the oldest first."""
        return tuple(self._entries)

    def plans(self, count: int) -> inference_pb2.PlansResponse:
        """See `router.plan_source`."""
        kept = list(self._entries)[-count:] if count else list(self._entries)
        now = self._clock.now()
        return inference_pb2.PlansResponse(
            mode=self._config.planner.mode.value,
            plans=[plan_to_wire(each.plan, each.outcomes, now) for each in reversed(kept)],
        )

    async def look(self) -> PlanEntry:
        """Look once, and carry out what is decided."""
        entry = PlanEntry(self._planner.plan(self._observe()))
        self._entries.append(entry)
        is_on = self._config.planner.mode is PlannerMode.ON
        for position, decision in enumerate(entry.plan.decisions):
            _log.info("planned", extra={"decision": str(decision), "is_carried_out": is_on})
            entry.outcomes.append("under way" if is_on else "not carried out")
            if is_on:
                entry.outcomes[position] = await self._carry_out(decision, entry, position)
        return entry

    def _observe(self) -> Observation:
        now = self._clock.now()
        summaries = self._router.worker_summaries()
        for summary in summaries:
            self._starting.pop(summary.info.worker_id, None)
        self._starting = {name: until for name, until in self._starting.items() if until > now}
        return Observation(
            now,
            self._workers.look(summaries, self._traffic.decoding()),
            self._traffic.look(now),
            self._config.scheduler.running_max,
            len(self._starting),
        )

    async def _carry_out(self, decision: Decision, entry: PlanEntry, position: int) -> str:
        """What became of it."""
        try:
            async with asyncio.timeout(_ORDER_TIMEOUT_S):
                match decision:
                    case SwitchRole(worker_id, role, _):
                        await self._control.set_role(worker_id, role)
                    case AddWorker(role, _):
                        self._ask_resources(self._workers_wanted(1))
                        name = await self._control.add_worker(role)
                        self._starting[name] = self._clock.now() + WORKER_START_TIMEOUT_S
                        return f"{name} is being started"
                    case RemoveWorker(worker_id, _):
                        # Its drain takes as long as its longest answer; others do not wait for it.
                        self._spawn(self._remove(worker_id, entry, position))
                        return "under way"
        except KvferryError as error:
            return _failed(decision, str(error))
        except TimeoutError:
            return _failed(decision, f"no answer within {_ORDER_TIMEOUT_S:g} s")
        return "done"

    async def _remove(self, worker_id: str, entry: PlanEntry, position: int) -> None:
        try:
            drained = await self._control.remove_worker(worker_id, self._config.planner.drain_s)
        except KvferryError as error:
            entry.outcomes[position] = _failed(entry.plan.decisions[position], str(error))
            return
        self._ask_resources(self._workers_wanted(0))
        entry.outcomes[position] = "done" if drained else "done, what it had goes on elsewhere"

    def _workers_wanted(self, more: int) -> int:
        return len(self._router.worker_summaries()) + len(self._starting) + more

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._config.planner.interval_s)
            try:
                await self.look()
            except Exception:  # noqa: BLE001 - of whatever kind, requests are served without plans
                _log.exception("a look of the planner failed")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _failed(decision: Decision, reason: str) -> str:
    _log.warning("not carried out", extra={"decision": str(decision), "reason": reason})
    return f"failed: {reason}"
