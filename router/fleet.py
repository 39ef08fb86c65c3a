"""All workers: who is in the cluster, how to call them, what is known of each.

Applies membership: a worker that left, or came back as a new process, loses its entries in the
index and its streams at once. One that drains loses its entries and keeps its streams.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import KvferryError, UnknownWorker, WorkerUnavailable
from kvferry.limits import AUDIT_CALL_GRACE_S, AUDIT_TIMEOUT_S, WORKER_STATUS_TIMEOUT_S
from kvferry.membership import Membership, Role
from router.bell import Bell
from router.fleet_capacity import fleet_capacity
from router.grpc_worker_client import GrpcWorkerClient
from router.load import LoadBook
from router.policy import ClusterView, Roster, WorkersView
from router.prefix_index import PrefixIndex
from router.worker_monitor import WorkerMonitor

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from numpy.typing import NDArray

    from kvferry.audit_report import AuditReport
    from kvferry.clock import Clock
    from kvferry.ids import WorkerId
    from kvferry.membership import WorkerInfo
    from router.fleet_capacity import FleetCapacity
    from router.load import DispatchTicket
    from router.policy import Route
    from router.prefix_index import IndexedWorker, IndexReport
    from router.worker_client import WorkerClient, WorkerStatus

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """One worker as this router knows it."""

    info: WorkerInfo
    is_reachable: bool
    status: WorkerStatus | None
    """Its last answer; None before the first."""
    index: IndexedWorker
    events_age_s: float | None
    """Since the last KV events or mark; None before the first, and for one that drains."""

    @property
    def indexed_blocks(self) -> int:
        """Event blocks that this router knows the worker to hold."""
        return self.index.blocks


@dataclass(slots=True, eq=False)
class _Member:
    info: WorkerInfo
    client: WorkerClient
    monitor: WorkerMonitor


@dataclass(frozen=True, slots=True, eq=False)
class _Usable:
    """Who may be chosen, until a worker comes, goes, or falls silent; and where they are found."""

    roster: Roster
    """Those that only compute, then those that decode."""
    prefillers: int
    """How many only compute."""
    load_rows: NDArray[np.intp]
    prefill_numbers: NDArray[np.intp]
    """In the index of those that only compute, which has none of the others."""
    decode_numbers: NDArray[np.intp]
    """In the index of those that decode."""
    are_late: bool
    """No worker that decodes answered last time; these may yet."""

    @property
    def prefill_rows(self) -> NDArray[np.intp]:
        """Of those that only compute."""
        return self.load_rows[: self.prefillers]

    @property
    def decode_rows(self) -> NDArray[np.intp]:
        """Of those that decode."""
        return self.load_rows[self.prefillers :]


class Fleet:
    """The live workers."""

    def __init__(
        self,
        *,
        clock: Clock,
        block_tokens: int,
        status_interval_s: float,
        connect: Callable[[WorkerInfo], WorkerClient] = GrpcWorkerClient,
        on_expected: Callable[[WorkerId, NDArray[np.uint64]], None] = lambda *_: None,
    ) -> None:
        """`on_expected`: as of the indexes."""
        self.workers_changed = Bell()
        """Rung whenever others may be chosen than before."""
        self.readiness_changed = asyncio.Event()
        """Set whenever `is_ready` may have changed; whoever waits for it clears it."""
        self._clock = clock
        self._block_tokens = block_tokens
        self._status_interval_s = status_interval_s
        self._connect = connect
        self._members: dict[WorkerId, _Member] = {}
        self._loads = LoadBook()
        self._prefill_index = PrefixIndex(on_expected=on_expected)
        self._decode_index = PrefixIndex(on_expected=on_expected)
        self._version = 0
        self._usable_now: _Usable | None = None
        """None: have to be found anew."""
        self._capacity: tuple[int, FleetCapacity] | None = None
        """With the changes of loads when it was found."""

    @property
    def membership_version(self) -> int:
        """Of the membership applied last; 0 before the first."""
        return self._version

    @property
    def is_ready(self) -> bool:
        """Whether some worker that decodes can be reached."""
        return any(
            member.monitor.is_reachable and member.info.role is not Role.PREFILL
            for member in self._open_members()
        )

    async def set_membership(self, membership: Membership) -> None:
        """Replace the workers; an older version than the known one changes nothing.

        Returns when the new ones have answered, at most `WORKER_STATUS_TIMEOUT_S` later.
        """
        if membership.version <= self._version:
            return
        self._version = membership.version
        wanted = {info.worker_id: info for info in membership.workers}
        # All at once, without a wait: from here on nobody who left is given anything, and the news
        # that one worker died waits neither for the end of another nor for an answer.
        departed = {
            worker_id: self._leave(member, wanted.get(worker_id))
            for worker_id, member in tuple(self._members.items())
            if wanted.get(worker_id) != member.info
        }
        joined = [info for info in membership.workers if info.worker_id not in self._members]
        for info in joined:
            self._join(info, departed.get(info.worker_id))
        await asyncio.gather(
            self.recheck([info.worker_id for info in joined]),
            *self._closing(departed.values()),
        )

    async def stop(self) -> None:
        """Forget all workers; their streams end."""
        departed = [self._leave(member, None) for member in tuple(self._members.values())]
        await asyncio.gather(*self._closing(departed))

    async def recheck(self, worker_ids: Iterable[WorkerId]) -> None:
        """Ask these workers for their status now, at most `WORKER_STATUS_TIMEOUT_S` long."""
        members = [self._members[id_] for id_ in worker_ids if id_ in self._members]
        if members:
            checks = (member.monitor.check() for member in members)
            # The calls end by themselves in that time; this bound holds if one does not.
            try:
                async with asyncio.timeout(2 * WORKER_STATUS_TIMEOUT_S):
                    await asyncio.gather(*checks)
            except TimeoutError:
                _log.warning("a status call outlived its deadline")

    def view(self, prompt: NDArray[np.uint64], *, goes_first: bool = False) -> ClusterView:
        """The workers to choose from, and what they hold of `prompt`: the hashes of its blocks.
        If it `goes_first`, they have only that to compute before it which does so too."""
        usable, step = self._usable(), self._block_tokens
        hits = np.zeros(len(usable.roster), dtype=np.int64)
        if usable.prefillers:
            self._prefill_index.note_hits(prompt, usable.prefill_numbers, step, hits)
        self._decode_index.note_hits(prompt, usable.decode_numbers, step, hits)
        loads = self._loads.loads(usable.load_rows)
        loads = loads.for_first() if goes_first else loads
        return ClusterView(WorkersView(usable.roster, hits, loads), usable.prefillers)

    def capacity(self, running_max: int) -> FleetCapacity:
        """What the workers can take in, each `running_max` sequences at a time. Costs something
        only where a load changed since."""
        usable, changes = self._usable(), self._loads.changes
        if self._capacity is None or self._capacity[0] != changes:
            decoders = usable.decode_rows
            loads = self._loads.loads(usable.prefill_rows if usable.prefillers else decoders)
            capacity = fleet_capacity(loads, decoders.size, running_max, self.kv_slots_max())
            self._capacity = changes, capacity
        return self._capacity[1]

    def dispatch(
        self, route: Route, kv_tokens: int, sequences: int, *, goes_first: bool = False
    ) -> DispatchTicket:
        """Count an attempt at its workers, at once."""
        return self._loads.dispatch(
            self._clock.now(),
            prefill=route.computing.worker_id,
            decode=route.decode.worker_id,
            prefill_tokens=route.prefill_tokens,
            kv_tokens=kv_tokens,
            sequences=sequences,
            goes_first=goes_first,
        )

    def prefilled(self, ticket: DispatchTicket) -> None:
        """The first token of an attempt arrived."""
        self._loads.prefilled(ticket)

    def end(self, ticket: DispatchTicket) -> None:
        """An attempt is over."""
        self._loads.end(ticket)

    def tokens_in_flight(self, worker_id: WorkerId) -> int:
        """Of the attempts of this router that the worker decodes, or whose prompt it computes."""
        return self._loads.active_tokens(worker_id)

    def client(self, worker_id: WorkerId) -> WorkerClient:
        """The connection to a worker of the last `view`."""
        return self._members[worker_id].client

    def info(self, worker_id: WorkerId) -> WorkerInfo:
        """One of the workers. Raises `UnknownWorker`."""
        if worker_id not in self._members:
            raise UnknownWorker(worker_id, self._members)
        return self._members[worker_id].info

    def kv_slots_max(self) -> int | None:
        """Slots of the largest worker that decodes and can be reached; None if unknown."""
        usable = self._usable()
        if usable.are_late:
            return None
        totals = self._loads.loads(usable.decode_rows).slots_total
        return int(totals.max(initial=0)) or None

    async def audit(self, worker_id: WorkerId | None) -> dict[WorkerId, AuditReport | KvferryError]:
        """Have one worker, or all (None), run every ledger check; an error where one could not.

        Takes at most `AUDIT_TIMEOUT_S + AUDIT_CALL_GRACE_S`. Raises `UnknownWorker`.
        """
        if worker_id is not None and worker_id not in self._members:
            raise UnknownWorker(worker_id, self._members)
        names = sorted(self._members) if worker_id is None else [worker_id]
        audits = [_audit(self._members[name].client) for name in names]
        return dict(zip(names, await asyncio.gather(*audits), strict=True))

    def summaries(self) -> list[WorkerSummary]:
        """Every worker, reachable or not."""
        return [self._summary_of(member) for member in self._members.values()]

    def index_reports(self) -> dict[str, IndexReport]:
        """The state of the prefix index of each pool, by the pool's name."""
        pools = {"prefill": self._prefill_index, "decode": self._decode_index}
        return {name: index.report() for name, index in pools.items()}

    def _open_members(self) -> list[_Member]:
        """Those that may be given something new."""
        return [member for member in self._members.values() if not member.info.is_draining]

    def _join(self, info: WorkerInfo, former: _Member | None) -> None:
        """Begin to use a worker; `former` is who had its name before this membership."""
        is_known = former is not None and _is_same_process(info, former.info)
        client = former.client if former is not None and is_known else self._connect(info)
        monitor = WorkerMonitor(
            info,
            client,
            loads=self._loads,
            index=self._index_of(info.role),
            clock=self._clock,
            interval_s=self._status_interval_s,
            on_change=self._workers_changed,
        )
        if former is not None and is_known:
            monitor.take_over(former.monitor)
        else:
            self._loads.add(info.worker_id, self._clock.now())
        self._members[info.worker_id] = _Member(info, client, monitor)
        monitor.start()
        self._workers_changed()

    def _leave(self, member: _Member, successor: WorkerInfo | None) -> _Member:
        """Forget a worker; a process that stays keeps its connection and streams."""
        worker_id = member.info.worker_id
        del self._members[worker_id]
        member.monitor.end()
        if successor is None or not _is_same_process(successor, member.info):
            self._loads.remove(worker_id)
            member.client.abort_streams(WorkerUnavailable(f"worker {worker_id} left the cluster"))
            _log.info("worker left", extra={"worker_id": worker_id})
        self._workers_changed()
        return member

    def _closing(self, departed: Iterable[_Member]) -> list[Coroutine[None, None, None]]:
        """What is left to be done about those who left, for whoever has time to wait for it."""
        kept = {id(member.client) for member in self._members.values()}
        closing: list[Coroutine[None, None, None]] = []
        for member in departed:
            closing.append(member.monitor.stop())
            if id(member.client) not in kept:
                closing.append(member.client.close())
        return closing

    def _index_of(self, role: Role) -> PrefixIndex:
        return self._prefill_index if role is Role.PREFILL else self._decode_index

    def _workers_changed(self) -> None:
        """Others may be chosen from now on."""
        self._usable_now = None
        self._capacity = None
        self.readiness_changed.set()
        self.workers_changed.ring()

    def _usable(self) -> _Usable:
        if self._usable_now is None:
            members = self._open_members()
            prefill = [m for m in members if m.info.role is Role.PREFILL and m.monitor.is_reachable]
            decode = [m for m in members if m.info.role is not Role.PREFILL]
            reachable = [member for member in decode if member.monitor.is_reachable]
            # If nobody answered last time, those that are only late: one late answer of the only
            # worker must not refuse every request meanwhile.
            decode = reachable or [member for member in decode if member.monitor.is_late]
            infos = [member.info for member in (*prefill, *decode)]
            names = [info.worker_id for info in infos]
            self._usable_now = _Usable(
                roster=Roster.of(infos),
                prefillers=len(prefill),
                load_rows=self._loads.rows_of(names),
                prefill_numbers=self._prefill_index.numbers_of(names),
                decode_numbers=self._decode_index.numbers_of(names),
                are_late=not reachable,
            )
        return self._usable_now

    def _summary_of(self, member: _Member) -> WorkerSummary:
        monitor, now = member.monitor, self._clock.now()
        heard_at = monitor.events_heard_at
        return WorkerSummary(
            info=member.info,
            is_reachable=monitor.is_reachable,
            status=monitor.last_status,
            index=self._index_of(member.info.role).worker(member.info.worker_id),
            events_age_s=None if heard_at is None else now - heard_at,
        )


async def _audit(client: WorkerClient) -> AuditReport | KvferryError:
    try:
        return await client.audit(AUDIT_TIMEOUT_S + AUDIT_CALL_GRACE_S)
    except KvferryError as error:
        return error


def _is_same_process(one: WorkerInfo, other: WorkerInfo) -> bool:
    return one.incarnation == other.incarnation and one.address == other.address
