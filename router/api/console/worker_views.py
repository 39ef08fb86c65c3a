"""What workers are asked for, for people: bounded however many people look, and how often.

A worker answers between two steps of its engine, so each view of an index keeps it from its work.
Hence a worker is asked by one caller at a time and with a pause between, and an answer is given to
all who ask the same within `CONSOLE_ANSWER_KEPT_S`. Nobody asks: no worker hears of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.errors import KvferryError, Overloaded
from kvferry.limits import (
    CONSOLE_ANSWER_KEPT_S,
    CONSOLE_HANDOFF_WORKERS_MAX,
    CONSOLE_TREE_INTERVAL_S,
    CONSOLE_TREE_WAITING_MAX,
    VIEW_CALL_GRACE_S,
    VIEW_TIMEOUT_S,
)

if TYPE_CHECKING:
    from kvferry.clock import Clock
    from kvferry.handoff_view import HandoffView
    from kvferry.ids import WorkerId
    from kvferry.tree_view import TreeQuery, TreeView
    from router.fleet import Fleet

_CALL_S = VIEW_TIMEOUT_S + VIEW_CALL_GRACE_S


@dataclass(slots=True, eq=False)
class _Turns:
    """The views of one worker's index."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    query: TreeQuery | None = None
    """What was asked last, and the answer, and when it came."""
    view: TreeView | None = None
    at_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class FleetHandoffs:
    """What the sides of all handoffs tell."""

    views: tuple[HandoffView, ...] = ()
    asked: int = 0
    """Workers."""
    silent: tuple[WorkerId, ...] = ()
    """Those of them that did not answer."""


class WorkerViews:
    """Of one router's fleet."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._turns: dict[WorkerId, _Turns] = {}
        self._handoffs = FleetHandoffs()
        self._handoffs_at_s = float("-inf")
        self._handoffs_lock = asyncio.Lock()

    async def tree(self, worker_id: WorkerId, query: TreeQuery) -> TreeView:
        """A part of one worker's index. Raises `UnknownWorker`, `Overloaded`, and what the call
        raises."""
        self._fleet.info(worker_id)
        self._forget_departed()
        turns = self._turns.setdefault(worker_id, _Turns())
        if turns.waiting >= CONSOLE_TREE_WAITING_MAX:
            what = f"{turns.waiting} callers wait for the index of {worker_id}"
            raise Overloaded(what, CONSOLE_TREE_INTERVAL_S * CONSOLE_TREE_WAITING_MAX)
        turns.waiting += 1
        try:
            async with turns.lock:
                return await self._next_view(worker_id, turns, query)
        finally:
            turns.waiting -= 1

    async def handoffs(self) -> FleetHandoffs:
        """Those that are not closed, of the workers that said they have any. Raises nothing for a
        worker that does not answer."""
        async with self._handoffs_lock:
            if self._clock.now() >= self._handoffs_at_s + CONSOLE_ANSWER_KEPT_S:
                self._handoffs = await self._ask_for_handoffs()
                self._handoffs_at_s = self._clock.now()
            return self._handoffs

    async def _next_view(self, worker_id: WorkerId, turns: _Turns, query: TreeQuery) -> TreeView:
        age_s = self._clock.now() - turns.at_s
        if turns.view is not None and turns.query == query and age_s < CONSOLE_ANSWER_KEPT_S:
            return turns.view
        if age_s < CONSOLE_TREE_INTERVAL_S:
            await asyncio.sleep(CONSOLE_TREE_INTERVAL_S - age_s)
        # It may have left the cluster meanwhile.
        self._fleet.info(worker_id)
        view = await self._fleet.client(worker_id).tree(query, _CALL_S)
        turns.query, turns.view, turns.at_s = query, view, self._clock.now()
        return view

    async def _ask_for_handoffs(self) -> FleetHandoffs:
        loads = [
            (summary.status.load.handoffs, summary.info.worker_id)
            for summary in self._fleet.summaries()
            if summary.is_reachable and summary.status is not None
        ]
        busiest = sorted((load for load in loads if load[0]), reverse=True)
        names = [name for _, name in busiest[:CONSOLE_HANDOFF_WORKERS_MAX]]
        answers = await asyncio.gather(*map(self._handoffs_of, names))
        return FleetHandoffs(
            views=tuple(view for answer in answers if answer is not None for view in answer),
            asked=len(names),
            silent=tuple(
                name for name, answer in zip(names, answers, strict=True) if answer is None
            ),
        )

    async def _handoffs_of(self, worker_id: WorkerId) -> tuple[HandoffView, ...] | None:
        try:
            return await self._fleet.client(worker_id).handoffs(_CALL_S)
        except KvferryError:
            return None

    def _forget_departed(self) -> None:
        present = {summary.info.worker_id for summary in self._fleet.summaries()}
        for worker_id in [name for name in self._turns if name not in present]:
            if not self._turns[worker_id].waiting:
                del self._turns[worker_id]
