"""Members of a cluster that are objects instead of processes, and their supervisor."""

from __future__ import annotations

import asyncio

from cluster.cluster_state import ClusterState
from cluster.configurations import Configurations
from cluster.launcher import FoundProcess, MemberEnded, MemberUnreached
from cluster.members import RouterInfo, RouterSpec, WorkerSpec
from cluster.supervisor import Supervisor
from cluster.takeover import Beginning
from kvferry.clock import MonotonicClock
from kvferry.config import config_from_mapping
from kvferry.ids import Incarnation, WorkerId
from kvferry.membership import Role, WorkerInfo

ROUTER = RouterSpec("router-0", "127.0.0.1", 0, 0)
DECODE = WorkerSpec(WorkerId("decode-0"), Role.DECODE, 1.0, 0.0, 1)
BACKOFF_S = 0.01
LONG_S = 60.0


class FakeMember:
    def __init__(self, spec, launch, refusal=None, stop_hangs=False):
        self.spec = spec
        self.launch = launch
        self.refusal = refusal
        self.stop_hangs = stop_hangs
        self.end = asyncio.get_running_loop().create_future()
        self.memberships = asyncio.Queue()
        self.info = None
        self.starts = 0
        self.stops = 0
        self.kills = 0
        self.killed = asyncio.Event()
        self.alive = True
        self.kill_error = None
        self.reached = ()
        self.works_at = {}
        self.log = []
        self.is_cut_off = False

    def check_wire(self):
        if self.is_cut_off:
            raise MemberUnreached("nobody answers")

    async def start(self):
        self.starts += 1
        await asyncio.sleep(0)
        if self.refusal is not None:
            return self.refusal
        if self.info is None:
            self.info = self.made_info()
        return self.info

    def made_info(self):
        if isinstance(self.spec, RouterSpec):
            return RouterInfo(self.spec.name, self.spec.host, 7000, 7001, pid=1)
        return WorkerInfo(
            self.spec.worker_id, self.spec.role, Incarnation(self.launch), "127.0.0.1:1"
        )

    async def retire(self, grace_s):
        self.log.append(f"{self.spec.name} retires")

    async def describe(self):
        self.check_wire()
        if self.end.done():
            raise MemberEnded("killed")
        return self.info

    async def wait_until_ended(self):
        self.check_wire()
        await asyncio.shield(self.end)

    async def is_alive(self):
        self.check_wire()
        return self.alive

    async def set_membership(self, membership):
        self.check_wire()
        self.memberships.put_nowait(membership)

    async def reached_workers(self):
        if self.end.done():
            raise MemberEnded("killed")
        return self.reached

    async def has_work_at(self, worker_id):
        if self.end.done():
            raise MemberEnded("killed")
        return self.works_at.get(worker_id, False)

    async def stop(self):
        self.stops += 1
        self.log.append(f"{self.spec.name} stops")
        await asyncio.sleep(0.01)
        self.log.append(f"{self.spec.name} has stopped")
        self.alive = False
        if self.stop_hangs:
            raise MemberEnded("gone before it could stop")

    async def kill(self):
        self.kills += 1
        self.killed.set()
        if self.kill_error is not None:
            raise self.kill_error
        if not self.end.done():
            self.die()

    def die(self):
        self.end.set_exception(MemberEnded("killed"))
        self.end.exception()  # asyncio complains of exceptions that nobody looked at


class FakeLauncher:
    def __init__(self, **options):
        self.members = {}
        self.configs = {}
        self.room = True
        self.refuse_when = lambda config: None
        self.log = []
        self.failures = {}
        self.held = {}
        """By launch an event: it takes until then."""
        self.options = options

    async def launch(self, spec, launch, config):
        if (spec.name, launch) in self.held:
            await self.held[spec.name, launch].wait()
        if (spec.name, launch) in self.failures:
            raise self.failures[spec.name, launch]
        member = FakeMember(spec, launch, **self.options)
        member.log = self.log
        member.refusal = member.refusal or self.refuse_when(config)
        self.members[spec.name, launch] = member
        self.configs[spec.name, launch] = config
        return member

    async def living(self):
        return [
            FoundProcess(name, launch, member)
            for (name, launch), member in self.members.items()
            if not member.end.done()
        ]

    async def has_room(self, spec):
        return self.room or isinstance(spec, RouterSpec)


class MemoryStore:
    """The record as a text; lives on when a supervisor is gone."""

    def __init__(self):
        self.text = None

    async def load(self):
        return self.text

    async def save(self, text):
        self.text = text


def config_of(router_grace_s=0.0, **more):
    """`more`: sections of the configuration."""
    router = {"stop_grace_s": router_grace_s} | more.pop("router", {})
    return config_from_mapping({"router": router, "restart_backoff_s": BACKOFF_S} | more)


def supervise(scenario, specs=(ROUTER, DECODE), router_grace_s=0.0, **options):
    """Run `scenario(supervisor, launcher)` beside a running supervisor, then stop it."""

    async def run():
        launcher = FakeLauncher(**options)
        config = config_of(router_grace_s)
        state = ClusterState(specs, BACKOFF_S, MonotonicClock(), config.workers)
        beginning = Beginning(state, Configurations({0: config}, 0), 1)
        supervisor = Supervisor(beginning, launcher, MemoryStore(), MonotonicClock())
        loop = asyncio.create_task(supervisor.run())
        try:
            async with asyncio.timeout(LONG_S):
                await scenario(supervisor, launcher)
        finally:
            await supervisor.stop()
            await loop
        return supervisor, launcher

    return asyncio.run(run())


async def until(supervisor, condition):
    view = supervisor.view()
    while not condition(view):
        view = await supervisor.wait_for_change(view.changes, LONG_S)
    return view


async def poll(condition):
    """Until what no change tells of."""
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
