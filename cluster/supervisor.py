"""Keeps the members of a cluster running: carries out what `ClusterState` decides.

One asyncio task runs the loop; each launch has a task of its own that starts the process, or finds
it started, watches it, and reports its end. All of them run on one loop, so the state needs no
lock. What a later supervisor has to know is on record before an order is answered.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.cluster_record import ClusterRecord
from cluster.cluster_state import Effect, Kill, Launch, Stop
from cluster.launcher import (
    FoundProcess,
    MemberEnded,
    MemberUnreached,
    NoAnswer,
    StartRefused,
)
from cluster.members import RouterInfo
from cluster.recorder import Recorder
from kvferry.errors import WorkerUnavailable
from kvferry.limits import (
    HEALTH_INTERVAL_S,
    STOP_TIMEOUT_S,
    SUPERVISION_GAP_MAX_S,
    WORKER_STATUS_TIMEOUT_S,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from cluster.cluster_record import RecordStore
    from cluster.launcher import Launcher, MemberHandle
    from cluster.member_state import MemberReport
    from cluster.members import MemberInfo, MemberSpec
    from cluster.rollout_plan import RolloutState
    from cluster.takeover import Beginning
    from kvferry.clock import Clock
    from kvferry.membership import Membership

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_DRAIN_POLL_S = 0.1
"""Between two questions whether a worker that drains has something left to do."""
_UNREACHED_POLL_S = 0.25
"""Between two calls of a member to which there is no connection."""
_HAS_WORK_TIMEOUT_S = 2 * WORKER_STATUS_TIMEOUT_S
"""For the answer, for which a router asks the worker."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What the supervisor tells those who ask."""

    membership: Membership
    routers: tuple[RouterInfo, ...]
    reports: tuple[MemberReport, ...]
    changes: int
    """Grows with every change of any of the above, over all supervisors of a cluster."""
    is_complete: bool


class Supervisor:
    """Runs the members of one cluster. Create and use it on one asyncio loop.

    Orders of operators are in `cluster.operations`.
    """

    def __init__(
        self, beginning: Beginning, launcher: Launcher, store: RecordStore, clock: Clock
    ) -> None:
        self.state = beginning.state
        self.configs = beginning.configs
        self.launcher = launcher
        self.clock = clock
        self.rollout: RolloutState | None = beginning.rollout
        """The last one, under way or over."""
        self.doing = ""
        """What it waits for, in words."""
        self.recorder = Recorder(store, self._record)
        self._starts = beginning.starts
        self._beginning = beginning
        self._handles: dict[tuple[str, int], MemberHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watches: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._kills: dict[str, asyncio.Task[None]] = {}
        """By member the end of its last process."""
        self._told: dict[tuple[str, int], int] = {}
        """Version of the membership that each router uses."""
        self._changes = beginning.state.membership.version
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._stopping = False
        self._fault: BaseException | None = None

    async def run(self) -> None:
        """Carry out effects until `stop` is called. Raises a fault of ours, of any task here."""
        self._go_on()
        turn = self.clock.now()
        while not self._stopping:
            if self._fault is not None:
                raise self._fault
            if self.clock.now() - turn > SUPERVISION_GAP_MAX_S:
                self.state.grant_time()
            turn = self.clock.now()
            effects = self.state.due()
            for effect in effects:
                self._apply(effect)
            if effects:
                await self.announce()
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
        routers, workers = self.state.shut_down()
        await self.announce()
        try:
            await self.recorder.save()
        except WorkerUnavailable as error:
            _log.warning("the stop is not on record", extra={"reason": str(error)})
        router_stop_s = self.configs.current.router.stop_grace_s + STOP_TIMEOUT_S
        await asyncio.gather(*(self._stop_member(each, router_stop_s) for each in routers))
        await asyncio.gather(*(self._stop_member(each, STOP_TIMEOUT_S) for each in workers))
        await self._end_what_is_left()

    def view(self) -> ClusterView:
        """The cluster as it is now."""
        return ClusterView(
            self.state.membership,
            self.state.routers(),
            self.state.reports(),
            self._changes,
            self.state.is_complete,
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
        for router in self.state.routers():
            unreached |= await self._unreached_by(router.name)
        return tuple(sorted(unreached))

    def routers_told(self) -> frozenset[str]:
        """Routers that know the current membership."""
        version = self.state.membership.version
        return frozenset(name for (name, _), told in self._told.items() if told == version)

    def check_running(self) -> None:
        """Raises `WorkerUnavailable` when the cluster stops."""
        if self._stopping:
            raise WorkerUnavailable("the cluster is stopping")

    async def announce(self) -> None:
        """Tell everybody who waits that the state has changed."""
        self._wake.set()
        self.recorder.touch()
        async with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def spawn(self, work: Coroutine[None, None, _T]) -> asyncio.Task[_T]:
        """Do this beside the loop, whom its failure ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def set_off(self, work: Coroutine[None, None, Any]) -> None:
        """As `spawn`, for work that nobody waits for."""
        task = self.spawn(work)
        assert not task.done(), "it begins with the next turn of the loop"

    async def take_out(self, name: str, version: int | None, drain_s: float) -> bool:
        """End a worker that drains when it has nothing left to do; whether it had not.

        `version` of the membership says that it drains; None: it does not run.
        """
        await self.announce()
        has_drained = version is None or await self._drain(name, version, drain_s)
        await self.end(self.state.remove(name))
        self.state.return_renewed(name)
        await self.announce()
        _log.info("worker drained", extra={"worker_id": name, "drained": has_drained})
        return has_drained

    async def retire(self, name: str, drain_s: float) -> None:
        """End a router when its requests have, after `drain_s` at the latest."""
        await self.announce()
        member = self.state.members.get(name)
        handle = None if member is None else self._handles.get((name, member.launch))
        if handle is not None:
            try:
                async with asyncio.timeout(drain_s + STOP_TIMEOUT_S):
                    await handle.retire(drain_s)
            except (TimeoutError, NoAnswer) as error:
                _log.warning("a router did not retire", extra={"reason": str(error)})
        await self.end(self.state.remove(name))
        await self.announce()
        _log.info("router retired", extra={"member": name})

    async def end(self, stop: Stop | None) -> None:
        """Stop the process of one that is not wanted any more, if it has one."""
        if stop is None:
            return
        # Its watcher first, to whom a member that is asked to stop would seem dead.
        watch = self._watches.pop((stop.name, stop.launch), None)
        if watch is not None:
            watch.cancel()
            await asyncio.wait({watch})
        await self._stop_member(stop, STOP_TIMEOUT_S)

    def _go_on(self) -> None:
        """Watch what was found, end what nobody wants, and go on with what was under way."""
        found = {process.name: process for process in self._beginning.found}
        for name, member in self.state.members.items():
            process = found.get(name)
            if process is not None and process.launch == member.launch:
                key = (name, process.launch)
                work = self._watch(member.spec, process.launch, process.handle)
                self._watches[key] = self.spawn(work)
            if member.drain_s is not None:
                version = self.state.membership.version
                if isinstance(member.info, RouterInfo):
                    self.set_off(self.retire(name, member.drain_s))
                else:
                    self.set_off(self.take_out(name, version, member.drain_s))
        for process in self._beginning.unwanted:
            self.set_off(self._end_unwanted(process))
        self.set_off(self.recorder.run())
        self.recorder.touch()

    def _record(self) -> ClusterRecord:
        state, configs = self.state, self.configs
        members = () if self._stopping else tuple(each.record() for each in state.members.values())
        used = {each.spec.revision for each in members}
        used |= {each.renewal.revision for each in members if each.renewal is not None}
        if self.rollout is not None and self.rollout.is_running:
            used.add(self.rollout.plan.former_revision)
        configs.keep_only(used)
        return ClusterRecord(
            starts=self._starts,
            configs=configs.by_revision,
            revision=configs.revision,
            lineage=state.settings.lineage,
            members=members,
            next_numbers=state.next_numbers,
            rollout=self.rollout,
        )

    async def _drain(self, worker_id: str, version: int, drain_s: float) -> bool:
        give_up = self.clock.now() + drain_s
        while self.state.is_running(worker_id):
            if await self._is_left_alone(worker_id, version):
                return True
            if self.clock.now() >= give_up:
                return False
            await asyncio.sleep(_DRAIN_POLL_S)
        return False

    async def _is_left_alone(self, worker_id: str, version: int) -> bool:
        """Whether every router knows that it drains, and nobody of anything it has to do."""
        running = {router.name for router in self.state.routers()}
        routers = {key: each for key, each in self._handles.items() if key[0] in running}
        told = [self._told[key] for key in routers if key in self._told]
        if not routers or len(told) < len(routers) or min(told) < version:
            return False
        try:
            async with asyncio.timeout(_HAS_WORK_TIMEOUT_S):
                answers = [await handle.has_work_at(worker_id) for handle in routers.values()]
        except (TimeoutError, NoAnswer):
            return False
        return not any(answers)

    async def _unreached_by(self, router: str) -> set[str]:
        lineage = self.state.members[router].spec.lineage
        workers = self.state.membership_of(lineage).workers
        members: set[str] = {info.worker_id for info in workers}
        reached: set[str] = set()
        for (name, _), handle in tuple(self._handles.items()):
            if name == router:
                try:
                    async with asyncio.timeout(WORKER_STATUS_TIMEOUT_S):
                        reached.update(await handle.reached_workers())
                except (TimeoutError, NoAnswer):
                    return members
        return members - reached

    async def _wait_for_work(self) -> None:
        due = self.state.next_due()
        # No longer than this, so that a gap in our own turns is seen for what it is.
        wait_s = HEALTH_INTERVAL_S
        if due is not None:
            wait_s = min(wait_s, max(0.0, due - self.clock.now()))
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def _apply(self, effect: Effect) -> None:
        match effect:
            case Launch(spec, launch):
                self._watches[spec.name, launch] = self.spawn(self._watch(spec, launch))
            case Kill(name, launch, reason):
                _log.warning("killing a member", extra={"member": name, "reason": reason})
                if (watch := self._watches.pop((name, launch), None)) is not None:
                    watch.cancel()  # Whom nobody reaches tells nobody of its end.
                self._kills[name] = self.spawn(self._kill(name, launch))

    async def _until_killed(self, name: str) -> None:
        """No two processes of one name: the former one first."""
        kill = self._kills.pop(name, None)
        if kill is not None:
            await asyncio.wait({kill})

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fault = fault
            self._wake.set()

    async def _end_what_is_left(self) -> None:
        """Processes whose launch or end was cut short by the stop."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                for process in await self.launcher.living():
                    await process.handle.kill()
        except (TimeoutError, NoAnswer, WorkerUnavailable) as error:
            _log.warning("processes may be left", extra={"reason": str(error)})

    async def _end_unwanted(self, process: FoundProcess) -> None:
        name, launch = process.name, process.launch
        _log.warning("ending a process that nobody wants", extra={"member": f"{name}/{launch}"})
        self._handles[name, launch] = process.handle
        await self._stop_member(Stop(name, launch), STOP_TIMEOUT_S)

    async def _kill(self, name: str, launch: int) -> None:
        """End a process by force. A failure is logged: to supervise the others goes before it."""
        self._told.pop((name, launch), None)
        handle = self._handles.pop((name, launch), None)
        if handle is None:
            return
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await handle.kill()
        except Exception:  # noqa: BLE001 - of whatever kind, it must not end all supervision
            _log.exception("cannot kill a member", extra={"member": name, "launch": launch})

    async def _stop_member(self, effect: Stop, timeout_s: float) -> None:
        handle = self._handles.get((effect.name, effect.launch))
        if handle is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await handle.stop()
        except (TimeoutError, NoAnswer) as error:
            _log.warning("no clean stop", extra={"member": effect.name, "reason": str(error)})
        except Exception:  # noqa: BLE001 - of whatever kind, the others must be stopped too
            _log.exception("stopping a member failed", extra={"member": effect.name})
        finally:
            await self._kill(effect.name, effect.launch)

    async def _watch(
        self, spec: MemberSpec, launch: int, found: MemberHandle | None = None
    ) -> None:
        """The life of one launch, from start to end; of one that was `found`, from now on."""
        reason, for_good = "", False
        try:
            if found is None:
                await self._until_killed(spec.name)
                found = await self._launch(spec, launch)
            self._handles[spec.name, launch] = found
            outcome = await self._until_reached(spec.name, launch, found.start)
            if isinstance(outcome, StartRefused):
                reason, for_good = outcome.reason, outcome.for_good
            else:
                await self._serve(spec.name, launch, found, outcome)
        except MemberEnded as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - outermost frame of the task: ends this launch
            _log.exception("watching a member failed", extra={"member": spec.name})
            reason = f"{type(error).__name__}: {error}"
        _log.warning("member ended", extra={"member": spec.name, "reason": reason})
        # Told first: nobody must be sent to it while its end is waited for.
        self.state.ended(spec.name, launch, reason, for_good=for_good)
        self._watches.pop((spec.name, launch), None)
        self._kills[spec.name] = self.spawn(self._kill(spec.name, launch))
        await self.announce()

    async def _launch(self, spec: MemberSpec, launch: int) -> MemberHandle:
        config = self.configs.of(spec.revision)
        launching = asyncio.create_task(self.launcher.launch(spec, launch, config))
        try:
            return await asyncio.shield(launching)
        except asyncio.CancelledError:
            if not self._stopping:  # The stop itself ends whatever lives.
                self.set_off(self._take_back(spec.name, launch, launching))
            raise

    async def _take_back(self, name: str, launch: int, launching: asyncio.Task[Any]) -> None:
        """A launch that took too long ends when there is something to end."""
        await asyncio.wait({launching})
        if launching.exception() is None:
            await self._end_unwanted(FoundProcess(name, launch, launching.result()))

    async def _serve(self, name: str, launch: int, handle: MemberHandle, info: MemberInfo) -> None:
        """Watch a launch that is ready. Returns never; raises `MemberEnded`."""
        _log.info("member ready", extra={"member": name, "info": str(info)})
        self.state.started(name, launch, info)
        await self.announce()
        watchers = [
            asyncio.create_task(self._until_reached(name, launch, handle.wait_until_ended)),
            asyncio.create_task(self._ask_health(name, launch, handle)),
        ]
        if isinstance(info, RouterInfo):
            watchers.append(asyncio.create_task(self._feed_router(name, launch, handle)))
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            raise MemberEnded("ended by itself")
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
            except MemberUnreached:
                self.state.unreached(name, launch)
                continue
            if not alive:
                raise MemberEnded("the engine has stopped")
            self.state.heard(name, launch)

    async def _feed_router(self, name: str, launch: int, handle: MemberHandle) -> None:
        """Push every version of the membership to a router, the current one first."""
        lineage = self.state.members[name].spec.lineage
        while True:
            membership = self.state.membership_of(lineage)
            tell = functools.partial(handle.set_membership, membership)
            await self._until_reached(name, launch, tell)
            self._told[name, launch] = membership.version
            await self._wait_for_newer(membership.version)

    async def _wait_for_newer(self, version: int) -> None:
        async with self._changed:
            # Whoever waits for this router to be told is told so.
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self.state.membership.version > version)

    async def _until_reached(self, name: str, launch: int, call: Callable[[], Awaitable[_T]]) -> _T:
        """What may be asked twice, until somebody answers. Whether that takes too long is judged
        by the state, which ends whoever waits here."""
        while True:
            try:
                return await call()
            except MemberUnreached:
                self.state.unreached(name, launch)
                await asyncio.sleep(_UNREACHED_POLL_S)
