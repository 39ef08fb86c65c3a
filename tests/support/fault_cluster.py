"""A local cluster for fault tests: real worker processes, a router, and somebody who restarts.

Two prefill and two decode workers by default, so that there is an elsewhere. The supervisor's
part is played here: a worker whose process has died leaves the membership and is started anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import random
import re
import signal
import threading
from multiprocessing import connection, reduction
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import to_mapping
from kvferry.membership import Membership, Role, WorkerInfo
from router.api.door_settings import DoorSettings
from router.api.grpc_server import serve
from router.api.request_metrics import RequestMetrics
from router.router import Router
from tests.support.fault_model import with_few_slots
from tests.support.fault_wire import Wire, open_device, run_wire
from tests.support.fault_worker import Held, Hold, Inspection, Pass, WorkerPlan, run_worker
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from pathlib import Path

    from kvferry.config import ClusterConfig
    from kvferry.ids import Incarnation

START_S = 60.0
STOP_S = 30.0
ROUTER_ADDRESS_NUMBER = 1
_ERROR_WORDS = re.compile(
    r'"level": "(error|critical)"|"exception"|Traceback|Fatal|terminate called'
)
_PRELOADED = ["tests.support.fault_worker"]


def _context() -> Any:
    """Processes come from a server that has imported what workers need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class WorkerHandle:
    """One worker's process, seen from the harness."""

    def __init__(self, plan: WorkerPlan, wire: Wire | None) -> None:
        self.plan = plan
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], Held] = {}
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._wire = wire
        self._control, child_end = _context().Pipe()
        self.process = _context().Process(target=run_worker, args=(plan, child_end))
        self.process.start()
        child_end.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.info: WorkerInfo = self._answer(START_S)

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    def hold_at(self, side: str, state: str) -> None:
        """Stand still the next time a handoff enters this state there."""
        self.take_held(side, state)  # one that was passed by has no meaning any more
        self._tell(Hold(side, state))

    def pass_by(self, side: str, state: str) -> None:
        """Do not stand there, or go on if it has just begun to."""
        self._tell(Pass(Hold(side, state)))

    def take_held(self, side: str, state: str) -> Held | None:
        """The handoff for which it stands there, told once; None if it does not."""
        with self._lock:
            return self._held.pop((side, state), None)

    def release(self) -> None:
        """Go on."""
        self._tell("release")

    def inspect(self, within_s: float = 40.0) -> Inspection:
        """Its accounts and what an audit finds."""
        self._tell("inspect")
        answer = self._answer(within_s)
        assert isinstance(answer, Inspection), answer
        return answer

    def wait_idle(self, within_s: float) -> None:
        """Fail unless it is back at its idle accounts in that time, and an audit finds nothing."""
        last: list[Inspection] = []

        def is_idle() -> bool:
            last[:] = [self.inspect()]
            return last[0].is_idle

        wait_until(f"idle {self.plan.worker_id}", is_idle, within_s, state=lambda: last)
        assert not last[0].violations, f"{self.plan.worker_id}: {last[0].violations}"

    def signal(self, number: int) -> None:
        """To its process."""
        os.kill(self.pid, number)

    def stop(self) -> None:
        """End it in order; by force if it does not."""
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self._tell("stop")
        self.process.join(STOP_S)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
        self.forget()
        assert code in (0, -signal.SIGKILL), f"{self.plan.worker_id} stops with {code}"

    def forget(self) -> None:
        """The process is dead or dying: free what we hold of it."""
        self.process.join(STOP_S)
        self._reader.join(STOP_S)
        self._control.close()
        if self._wire is not None:
            self._wire.detach(self.plan.address)

    def _tell(self, what: object) -> None:
        """Nothing happens to a process that has died."""
        try:
            with self._lock:
                self._control.send(what)
        except OSError:
            self.process.join(STOP_S)
            assert self.process.exitcode is not None, f"{self.plan.worker_id} is deaf"

    def _answer(self, within_s: float) -> Any:
        try:
            answer = self._answers.get(timeout=within_s)
        except Empty:
            raise AssertionError(f"{self.plan.worker_id} is silent for {within_s} s") from None
        assert answer is not None, f"{self.plan.worker_id} died"
        return answer

    def _read(self) -> None:
        try:
            while True:
                match self._control.recv():
                    case Held() as held:
                        with self._lock:
                            self._held[held.side, held.state] = held
                    case "device":
                        assert self._wire is not None
                        device = reduction.recv_handle(self._control)
                        self._wire.attach(self.plan.address, device)
                    case answer:
                        self._answers.put(answer)
        except (EOFError, OSError):
            self._answers.put(None)


class FaultCluster:
    """Router and workers, as a context manager; at its end no process is left."""

    def __init__(
        self,
        config: ClusterConfig,
        directory: Path,
        *,
        prefill: int = 2,
        decode: int = 2,
        fake_model: bool = True,
        networked: bool = False,
        cramped: bool = False,
    ) -> None:
        """`networked`: each worker in a namespace; `cramped`: decode workers have few slots."""
        self.workers: dict[str, WorkerHandle] = {}
        self.exiles: list[WorkerHandle] = []
        """Cut off for good and replaced, still running."""
        self.wire: Wire | None = None
        self.unexpected_deaths: list[str] = []
        self.pids: list[int] = []
        self._config = config
        self._directory = directory
        self._roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
        self._fake_model = fake_model
        self._networked = networked
        self._cramped = cramped
        self._subnet = f"10.{random.Random().randrange(200, 250)}.{os.getpid() % 250 + 1}"
        self._next_host = 10
        self._expected_deaths: set[int] = set()
        self._version = 0
        self._logs_read_to: dict[Path, int] = {}
        self._changing = threading.RLock()
        self._ending = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    # --- start and end ---

    def __enter__(self) -> Self:
        self._loop_thread.start()
        if self._networked:
            self._start_wire()
        for role in (Role.PREFILL, Role.DECODE):
            for number in range(self._roles.count(role)):
                self._launch(f"{role.value}-{number}", role)
        self._start_router()
        self._tell_membership()
        self._watcher.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        self._watcher.join(START_S)
        try:
            self._run(self._front_door.stop(0.5))
            self._run(self._router.stop())
            for handle in (*self.workers.values(), *self.exiles):
                handle.stop()
        finally:
            self._end_by_force()
        assert not alive(self.pids), f"still running: {alive(self.pids)}"

    def _end_by_force(self) -> None:
        for handle in (*self.workers.values(), *self.exiles):
            if handle.process.is_alive():
                handle.process.kill()
                handle.process.join(STOP_S)
        if self.wire is not None:
            self._wire_control.close()
            self._wire_process.join(STOP_S)
            os.close(self._router_device)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join(STOP_S)
        self._loop.close()

    def _start_wire(self) -> None:
        self._wire_control, child_end = _context().Pipe()
        self._wire_process = _context().Process(target=run_wire, args=(child_end, 0))
        self._wire_process.start()
        child_end.close()
        self.wire = Wire(self._wire_control, self._wire_process.pid)
        self.router_address = f"{self._subnet}.{ROUTER_ADDRESS_NUMBER}"
        self._router_device = open_device(f"kvf{os.getpid()}", self.router_address)
        self.wire.attach(self.router_address, os.dup(self._router_device))

    def _start_router(self) -> None:
        clock, directory = MonotonicClock(), resolve_model(self._config.model.path)

        async def start() -> tuple[Any, int]:
            self._router = Router(self._config, directory, clock, random.Random(0))
            await self._router.start()
            doors = DoorSettings(self._router, RequestMetrics(self._router, clock))
            return await serve(doors, ("127.0.0.1", 0))

        self._front_door, port = self._run(start())
        self.address = f"127.0.0.1:{port}"

    # --- workers ---

    def by_incarnation(self, incarnation: Incarnation) -> WorkerHandle:
        """The worker with that incarnation."""
        with self._changing:
            (found,) = [w for w in self.workers.values() if w.info.incarnation == incarnation]
            return found

    def of_role(self, role: Role) -> list[WorkerHandle]:
        """The workers of a role."""
        with self._changing:
            return [worker for worker in self.workers.values() if worker.info.role is role]

    def kill(self, worker: WorkerHandle) -> None:
        """SIGKILL; a new process takes its place."""
        self._expected_deaths.add(worker.pid)
        worker.signal(signal.SIGKILL)

    def exile(self, worker: WorkerHandle) -> None:
        """As a supervisor does that has given a worker up: replace it; the old one still runs."""
        with self._changing:
            self.exiles.append(worker)
            self._replace(worker)

    def end_exile(self, worker: WorkerHandle) -> None:
        """Kill what was replaced alive."""
        self.exiles.remove(worker)
        worker.signal(signal.SIGKILL)
        worker.forget()

    def wait_whole(self, within_s: float) -> None:
        """Until every place is taken and the router reaches all of them."""
        wait_until("whole cluster", self._is_whole, within_s, state=self._reachable)

    def assert_idle(self, within_s: float) -> None:
        """Every worker that lives is back at its idle accounts, and an audit finds nothing."""
        for worker in (*self.workers.values(), *self.exiles):
            worker.wait_idle(within_s)
        assert not self.unexpected_deaths, self.unexpected_deaths

    def new_errors(self) -> list[str]:
        """Lines of workers' logs since the last call that speak of a fault of ours."""
        found: list[str] = []
        for file in sorted(self._directory.glob("*.log")):
            text = file.read_text()
            new = text[self._logs_read_to.get(file, 0) :]
            self._logs_read_to[file] = len(text)
            found += [line for line in new.splitlines() if _ERROR_WORDS.search(line)]
        return found

    def logs(self, characters: int = 3000) -> str:
        """The ends of the workers' logs."""
        files = sorted(self._directory.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-characters:]}" for file in files)

    def _is_whole(self) -> bool:
        with self._changing:
            # Of a process just killed neither the watcher nor the router need know yet.
            wanted = {
                worker.info.incarnation
                for worker in self.workers.values()
                if worker.pid not in self._expected_deaths
            }
        return len(wanted) == len(self._roles) and self._reachable() == wanted

    def _reachable(self) -> set[Incarnation]:
        async def ask() -> set[Incarnation]:
            summaries = self._router.fleet.summaries()
            return {entry.info.incarnation for entry in summaries if entry.is_reachable}

        reachable: set[Incarnation] = self._run(ask())
        return reachable

    def _launch(self, worker_id: str, role: Role) -> None:
        config, address = self._config, ""
        if self._cramped and role is Role.DECODE:
            config = with_few_slots(config)
        if self._networked:
            self._next_host = 10 + (self._next_host - 9) % 240
            address = f"{self._subnet}.{self._next_host}"
            config = dataclasses.replace(config, worker_host=address)
        plan = WorkerPlan(
            to_mapping(config),
            worker_id,
            role.value,
            str(self._directory / f"{worker_id}.log"),
            self._fake_model,
            address,
        )
        worker = WorkerHandle(plan, self.wire)
        self.pids.append(worker.pid)
        with self._changing:
            self.workers[worker_id] = worker

    def _replace(self, worker: WorkerHandle) -> None:
        del self.workers[worker.plan.worker_id]
        self._tell_membership()
        self._launch(worker.plan.worker_id, worker.info.role)
        self._tell_membership()

    def _tell_membership(self) -> None:
        with self._changing:
            self._version += 1
            infos = tuple(worker.info for worker in self.workers.values())
            self._run(self._router.set_membership(Membership(self._version, infos)))

    def _watch(self) -> None:
        """Notice deaths as Ray does, at once, and start new processes."""
        while not self._ending.is_set():
            with self._changing:
                sentinels = {w.process.sentinel: w for w in self.workers.values()}
            for sentinel in connection.wait(list(sentinels), timeout=0.02):
                worker = sentinels[sentinel]  # type: ignore[index]
                with self._changing:
                    if self.workers.get(worker.plan.worker_id) is not worker:
                        continue
                    if worker.pid not in self._expected_deaths:
                        self.unexpected_deaths.append(f"{worker.plan.worker_id} {worker.pid}")
                    self._replace(worker)
                worker.forget()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_S)


def alive(pids: Sequence[int]) -> list[int]:
    """Those that still run; zombies do not."""
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                if file.read().rpartition(")")[2].split()[0] != "Z":
                    found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found
