"""Follows one worker: asks for its status in intervals, and reads its stream of KV events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from kvferry.errors import DeadlineExceeded, KvferryError, WorkerUnavailable
from kvferry.limits import (
    KV_EVENTS_RETRY_S,
    KV_EVENTS_SILENCE_MAX_S,
    WORKER_STATUS_FAILURES_MAX,
    WORKER_STATUS_TIMEOUT_S,
)
from router.prefix_index import EventGap

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvferry.clock import Clock
    from kvferry.membership import WorkerInfo
    from router.load import LoadBook
    from router.prefix_index import PrefixIndex
    from router.worker_client import WorkerClient, WorkerStatus

_log = logging.getLogger(__name__)


class WorkerMonitor:
    """Keeps the load book and one pool's index up to date about one worker."""

    def __init__(
        self,
        info: WorkerInfo,
        client: WorkerClient,
        *,
        loads: LoadBook,
        index: PrefixIndex,
        clock: Clock,
        interval_s: float,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when `is_reachable`, `is_late` or its place in the index did."""
        self.info = info
        self.is_reachable = False
        """Whether the last status call was answered; False before the first."""
        self.last_status: WorkerStatus | None = None
        self.is_late = False
        """Whether it answered before, is connected, and let the last few calls time out."""
        self.events_heard_at: float | None = None
        """When the last KV events, or the sign that there are none, came; None before the first."""
        self._client = client
        self._loads = loads
        self._index = index
        self._clock = clock
        self._interval_s = interval_s
        self._on_change = on_change
        self._failures = 0
        self._has_ended = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow the worker. Whoever starts it makes the first `check`.

        A worker that drains is asked for its status alone: what it holds is of no more use.
        """
        self._tasks = [asyncio.create_task(self._guard(self._poll_status()))]
        if not self.info.is_draining:
            self._index.join(self.info.worker_id, self.info.incarnation)
            self._tasks.append(asyncio.create_task(self._guard(self._follow_events())))

    def take_over(self, former: WorkerMonitor) -> None:
        """Know what another monitor of the same process knew; before `start`."""
        self.is_reachable = former.is_reachable
        self.is_late = former.is_late
        self.last_status = former.last_status

    def end(self) -> None:
        """Stop following, at once: nothing that is still under way changes anything any more."""
        if self._has_ended:
            return
        self._has_ended = True
        self._index.leave(self.info.worker_id)
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """`end`, and wait until all that was under way has noticed."""
        self.end()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def check(self) -> None:
        """Ask for the status once; bounded by `WORKER_STATUS_TIMEOUT_S`."""
        asked_at = self._clock.now()
        try:
            status = await self._client.status(WORKER_STATUS_TIMEOUT_S)
        except KvferryError as error:
            if not self._has_ended:
                self._note_failure(error)
            return
        if self._has_ended:
            # By now its name may be that of another process, or its role another one.
            return
        self._failures = 0
        self.last_status = status
        self._loads.report(self.info.worker_id, asked_at, status.load, status.accounts)
        self._set_state(is_reachable=True, is_late=False)

    def _note_failure(self, error: KvferryError) -> None:
        self._failures += 1
        if self.is_reachable:
            _log.warning(
                "worker does not answer",
                extra={"worker_id": self.info.worker_id, "reason": str(error)},
            )
        is_lost = self._failures >= WORKER_STATUS_FAILURES_MAX
        was_known = self.last_status is not None
        is_late = was_known and not is_lost and isinstance(error, DeadlineExceeded)
        self._set_state(is_reachable=False, is_late=is_late)
        if is_lost:
            lost = f"worker {self.info.worker_id} has not answered {self._failures} times: {error}"
            self._client.abort_streams(WorkerUnavailable(lost))

    def _set_state(self, *, is_reachable: bool, is_late: bool) -> None:
        if (is_reachable, is_late) != (self.is_reachable, self.is_late):
            self.is_reachable = is_reachable
            self.is_late = is_late
            self._on_change()

    async def _poll_status(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.check()

    async def _follow_events(self) -> None:
        """Subscribe for ever: a new subscription begins with a snapshot, which mends a gap."""
        while True:
            began_at = self._clock.now()
            try:
                await self._read_events()
                reason = "the worker ended the stream"
            except (EventGap, KvferryError) as error:
                reason = str(error)
            except TimeoutError:
                reason = f"not even a mark for {KV_EVENTS_SILENCE_MAX_S:g} s"
            _log.info(
                "KV events interrupted",
                extra={"worker_id": self.info.worker_id, "reason": reason},
            )
            self._index.lose(self.info.worker_id)
            # At once after a stream that served for a while.
            await asyncio.sleep(max(0.0, began_at + KV_EVENTS_RETRY_S - self._clock.now()))

    async def _read_events(self) -> None:
        """Apply one subscription to its end. Raises `EventGap`, `KvferryError`, `TimeoutError`."""
        loop = asyncio.get_running_loop()
        async with (
            contextlib.aclosing(self._client.kv_events()) as batches,
            asyncio.timeout(KV_EVENTS_SILENCE_MAX_S) as silence,
        ):
            async for batch in batches:
                silence.reschedule(loop.time() + KV_EVENTS_SILENCE_MAX_S)
                self.events_heard_at = self._clock.now()
                for _ in self._index.steps(batch):
                    await asyncio.sleep(0)

    async def _guard(self, loop: Coroutine[None, None, None]) -> None:
        """Outermost frame of a task: a bug of ours costs this worker, visibly."""
        try:
            await loop
        except Exception:  # noqa: BLE001 - ends the task, with the reason in the log
            _log.exception("monitor failed", extra={"worker_id": self.info.worker_id})
            self._index.leave(self.info.worker_id)
            self.is_reachable = False
            self._on_change()
