"""Keeps the members of a cluster running: carries out what `ClusterState` decides.

One asyncio task runs the loop; each launch has a task of its own that starts the process, watches
it, and reports its end. All of them run on one loop, so the state needs no lock.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.cluster_state import ClusterState, Effect, Kill, Launch, MemberReport, Stop
from cluster.launcher import MemberEnded, StartRefused
from cluster.members import RouterInfo
from kvferry.errors import WorkerUnavailable
from kvferry.limits import HEALTH_INTERVAL_S, STOP_TIMEOUT_S, WORKER_STATUS_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from cluster.launcher import Launcher, MemberHandle
    from cluster.members import MemberInfo, MemberSpec
    from kvferry.clock import Clock
    from kvferry.ids import WorkerId
    from kvferry.membership import Membership, Role

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_DRAIN_POLL_S = 0.1
"""Between two questions whether a worker that drains has something left to do."""
_HAS_WORK_TIMEOUT_S = 2 * WORKER_STATUS_TIMEOUT_S
"""For the answer, for which a router asks the worker."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What the supervisor tells those who ask."""

    membership: Membership
    routers: tuple[RouterInfo, ...]
    reports: tuple[MemberReport, ...]
    changes: int
    """Grows with every change of any of the above."""
    is_complete: bool


class Supervisor:
    """Runs the members of one cluster. Create and use it on one asyncio loop."""

    def __init__(
        self, state: ClusterState, launcher: Launcher, clock: Clock, router_grace_s: float
    ) -> None:
        """`router_grace_s`: how long routers that stop wait for their requests."""
        self._router_stop_s = router_grace_s + STOP_TIMEOUT_S
        self._state = state
        self._launcher = launcher
        self._clock = clock
        self._handles: dict[tuple[str, int], MemberHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watches: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._told: dict[tuple[str, int], int] = {}
        """Version of the membership that each router uses."""
        self._changes = 0
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._stopping = False
        self._fault: BaseException | None = None

    async def run(self) -> None:
        """Carry out effects until `stop` is called. Raises a fault of ours, of any task here."""
        while not self._stopping:
            if self._fault is not None:
                raise self._fault
            effects = self._state.due()
            for effect in effects:
                self._apply(effect)
            if effects:
                await self._announce()
            await self._wait_for_work()

    async def stop(self) -> None:
        """End routers, then workers, each within `STOP_TIMEOUT_S`, routers after their grace.

        Nothing is started any more.
        """
        if self._stopping:
            return
        self._stopping = True
        self._wake.set()
        # Watchers first: a member that is asked to stop would seem dead to them, and routers would
        # be told that all workers are gone while they still answer with them.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        routers, workers = self._state.shut_down()
        await self._announce()
        await asyncio.gather(*(self._stop_member(each, self._router_stop_s) for each in routers))
        await asyncio.gather(*(self._stop_member(each, STOP_TIMEOUT_S) for each in workers))

    def view(self) -> ClusterView:
        """The cluster as it is now."""
        return ClusterView(
            self._state.membership,
            self._state.routers(),
            self._state.reports(),
            self._changes,
            self._state.is_complete,
        )

    async def wait_for_change(self, seen: int, timeout_s: float) -> ClusterView:
        """The view as soon as its `changes` is beyond `seen`, or after `timeout_s`."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self._changes > seen)
            except TimeoutError:
                pass  # The caller sees by `changes` that nothing has happened.
        return self.view()

    async def unreached_workers(self) -> tuple[str, ...]:
        """Workers of the membership that some running router was not told of or does not reach."""
        unreached: set[str] = set()
        for router in self._state.routers():
            unreached |= await self._unreached_by(router.name)
        return tuple(sorted(unreached))

    async def add_worker(self, role: Role) -> WorkerId:
        """Start one more worker. Returns its name, at once. Raises `InvalidInput`."""
        self._check_running()
        worker_id = self._state.add_worker(role)
        await self._announce()
        return worker_id

    async def set_role(self, worker_id: str, role: Role) -> None:
        """Have routers use a worker for something else. Nothing that runs is disturbed.

        Raises `UnknownWorker` and `InvalidInput`.
        """
        self._check_running()
        self._state.set_role(worker_id, role)
        await self._announce()

    async def remove_worker(self, worker_id: str, drain_s: float) -> bool:
        """Give a worker nothing new, wait up to `drain_s` until it has nothing left to do, end it.

        Returns whether it had nothing left; if not, its requests go on elsewhere. The removal goes
        on when its caller does not wait for it. Raises `UnknownWorker` and `InvalidInput`, and
        `WorkerUnavailable` when the cluster stops meanwhile.
        """
        self._check_running()
        version = self._state.drain(worker_id)
        removal = self._spawn(self._remove(worker_id, version, drain_s))
        await asyncio.wait({removal})
        if removal.cancelled():
            raise WorkerUnavailable("the cluster is stopping")
        return removal.result()

    def _check_running(self) -> None:
        if self._stopping:
            raise WorkerUnavailable("the cluster is stopping")

    async def _remove(self, worker_id: str, version: int | None, drain_s: float) -> bool:
        """`version` of the membership says that it drains; None: it does not run."""
        await self._announce()
        has_drained = version is None or await self._drain(worker_id, version, drain_s)
        stop = self._state.remove(worker_id)
        await self._announce()
        if stop is not None:
            # Its watcher first, to whom a member that is asked to stop would seem dead.
            watch = self._watches.pop((stop.name, stop.launch))
            watch.cancel()
            await asyncio.wait({watch})
            await self._stop_member(stop, STOP_TIMEOUT_S)
        _log.info("worker removed", extra={"worker_id": worker_id, "drained": has_drained})
        return has_drained

    async def _drain(self, worker_id: str, version: int, drain_s: float) -> bool:
        give_up = self._clock.now() + drain_s
        while self._state.is_running(worker_id):
            if await self._is_left_alone(worker_id, version):
                return True
            if self._clock.now() >= give_up:
                return False
            await asyncio.sleep(_DRAIN_POLL_S)
        return False

    async def _is_left_alone(self, worker_id: str, version: int) -> bool:
        """Whether every router knows that it drains, and nobody of anything it has to do."""
        running = {router.name for router in self._state.routers()}
        routers = {key: each for key, each in self._handles.items() if key[0] in running}
        told = [self._told[key] for key in routers if key in self._told]
        if not routers or len(told) < len(routers) or min(told) < version:
            return False
        try:
            async with asyncio.timeout(_HAS_WORK_TIMEOUT_S):
                answers = [await handle.has_work_at(worker_id) for handle in routers.values()]
        except (TimeoutError, MemberEnded):
            return False
        return not any(answers)

    async def _unreached_by(self, router: str) -> set[str]:
        members: set[str] = {info.worker_id for info in self._state.membership.workers}
        reached: set[str] = set()
        for (name, _), handle in tuple(self._handles.items()):
            if name == router:
                try:
                    async with asyncio.timeout(WORKER_STATUS_TIMEOUT_S):
                        reached.update(await handle.reached_workers())
                except (TimeoutError, MemberEnded):
                    return members
        return members - reached

    async def _wait_for_work(self) -> None:
        due = self._state.next_due()
        wait_s = None if due is None else max(0.0, due - self._clock.now())
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _announce(self) -> None:
        self._wake.set()
        async with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _apply(self, effect: Effect) -> None:
        match effect:
            case Launch(spec, launch):
                self._watches[spec.name, launch] = self._spawn(self._watch(spec, launch))
            case Kill(name, launch, reason):
                _log.warning("killing a member", extra={"member": name, "reason": reason})
                self._kill(name, launch)

    def _spawn(self, work: Coroutine[None, None, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fault = fault
            self._wake.set()

    def _kill(self, name: str, launch: int) -> None:
        """End a process by force. A failure is logged: to supervise the others goes before it."""
        self._told.pop((name, launch), None)
        handle = self._handles.pop((name, launch), None)
        if handle is None:
            return
        try:
            handle.kill()
        except Exception:  # noqa: BLE001 - of whatever kind, it must not end all supervision
            _log.exception("cannot kill a member", extra={"member": name, "launch": launch})

    async def _stop_member(self, effect: Stop, timeout_s: float) -> None:
        handle = self._handles.get((effect.name, effect.launch))
        if handle is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await handle.stop()
        except (TimeoutError, MemberEnded) as error:
            _log.warning("no clean stop", extra={"member": effect.name, "reason": str(error)})
        except Exception:  # noqa: BLE001 - of whatever kind, the others must be stopped too
            _log.exception("stopping a member failed", extra={"member": effect.name})
        finally:
            self._kill(effect.name, effect.launch)

    async def _watch(self, spec: MemberSpec, launch: int) -> None:
        """The life of one launch, from start to end."""
        reason, for_good = "", False
        try:
            handle = self._launcher.launch(spec, launch)
            self._handles[spec.name, launch] = handle
            outcome = await handle.start()
            if isinstance(outcome, StartRefused):
                reason, for_good = outcome.reason, outcome.for_good
            else:
                await self._serve(spec.name, launch, handle, outcome)
        except MemberEnded as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - outermost frame of the task: ends this launch
            _log.exception("watching a member failed", extra={"member": spec.name})
            reason = f"{type(error).__name__}: {error}"
        _log.warning("member ended", extra={"member": spec.name, "reason": reason})
        self._kill(spec.name, launch)
        self._state.ended(spec.name, launch, reason, for_good=for_good)
        del self._watches[spec.name, launch]
        await self._announce()

    async def _serve(self, name: str, launch: int, handle: MemberHandle, info: MemberInfo) -> None:
        """Watch a launch that is ready. Returns never; raises `MemberEnded`."""
        _log.info("member ready", extra={"member": name, "info": str(info)})
        self._state.started(name, launch, info)
        await self._announce()
        watchers = [
            asyncio.create_task(_pend(handle)),
            asyncio.create_task(self._ask_health(name, launch, handle)),
        ]
        if isinstance(info, RouterInfo):
            watchers.append(asyncio.create_task(self._feed_router(name, launch, handle)))
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _ask_health(self, name: str, launch: int, handle: MemberHandle) -> None:
        """Ends with `MemberEnded` when the process says that it can serve no more.

        Silence is judged by the state, so an unanswered question needs no action here.
        """
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            try:
                async with asyncio.timeout(WORKER_STATUS_TIMEOUT_S):
                    alive = await handle.is_alive()
            except TimeoutError:
                continue
            if not alive:
                raise MemberEnded("the engine has stopped")
            self._state.heard(name, launch)

    async def _feed_router(self, name: str, launch: int, handle: MemberHandle) -> None:
        """Push every version of the membership to a router, the current one first."""
        while True:
            membership = self._state.membership
            await handle.set_membership(membership)
            self._told[name, launch] = membership.version
            await self._wait_for_newer(membership.version)

    async def _wait_for_newer(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._state.membership.version > version)


async def _pend(handle: MemberHandle) -> None:
    await handle.wait_until_ended()
    raise MemberEnded("ended by itself")
