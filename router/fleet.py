"""All workers: who is in the cluster, how to call them, what is known of each.

Applies membership: a worker that left, or came back as a new process, loses its entries in the
index and its streams at once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import KvferryError, UnknownWorker, WorkerUnavailable
from kvferry.limits import AUDIT_CALL_GRACE_S, AUDIT_TIMEOUT_S, WORKER_STATUS_TIMEOUT_S
from kvferry.membership import Membership, Role
from router.load import LoadBook
from router.policy import ClusterView, WorkerView
from router.prefix_index import PrefixIndex
from router.worker_client import GrpcWorkerClient
from router.worker_monitor import WorkerMonitor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvferry.audit_report import AuditReport
    from kvferry.clock import Clock
    from kvferry.ids import WorkerId
    from kvferry.kv_events import BlockHash
    from kvferry.membership import WorkerInfo
    from router.load import DispatchTicket
    from router.policy import Route
    from router.worker_client import WorkerClient, WorkerStatus

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """One worker as this router knows it."""

    info: WorkerInfo
    is_reachable: bool
    status: WorkerStatus | None
    """Its last answer; None before the first."""
    indexed_blocks: int


@dataclass(slots=True, eq=False)
class _Member:
    client: WorkerClient
    monitor: WorkerMonitor

    @property
    def info(self) -> WorkerInfo:
        return self.monitor.info


class Fleet:
    """The live workers."""

    def __init__(
        self,
        *,
        clock: Clock,
        block_tokens: int,
        status_interval_s: float,
        connect: Callable[[WorkerInfo], WorkerClient] = GrpcWorkerClient,
    ) -> None:
        self.readiness_changed = asyncio.Event()
        """Set whenever `is_ready` may have changed; whoever waits for it clears it."""
        self._clock = clock
        self._block_tokens = block_tokens
        self._status_interval_s = status_interval_s
        self._connect = connect
        self._members: dict[WorkerId, _Member] = {}
        self._loads = LoadBook()
        self._prefill_index = PrefixIndex()
        self._decode_index = PrefixIndex()
        self._version = 0
        self._applying = asyncio.Lock()

    @property
    def membership_version(self) -> int:
        """Of the membership applied last; 0 before the first."""
        return self._version

    @property
    def is_ready(self) -> bool:
        """Whether some worker that decodes can be reached."""
        return any(
            member.monitor.is_reachable and member.info.role is not Role.PREFILL
            for member in self._members.values()
        )

    async def set_membership(self, membership: Membership) -> None:
        """Replace the workers; an older version than the known one changes nothing.

        Returns when the new ones have answered, at most `WORKER_STATUS_TIMEOUT_S` later.
        """
        async with self._applying:
            if membership.version <= self._version:
                return
            self._version = membership.version
            wanted = {info.worker_id: info for info in membership.workers}
            unchanged = {
                worker_id
                for worker_id, member in self._members.items()
                if wanted.get(worker_id) == member.info
            }
            for worker_id, member in tuple(self._members.items()):
                if worker_id not in unchanged:
                    await self._leave(member, wanted.get(worker_id))
            for info in membership.workers:
                if info.worker_id not in self._members:
                    self._join(info, self._connect(info), is_new=True)
            self.readiness_changed.set()
        # Not within the lock: a worker that does not answer must not delay the news that
        # another one died.
        await self.recheck(wanted.keys() - unchanged)

    async def stop(self) -> None:
        """Forget all workers; their streams end."""
        async with self._applying:
            for member in tuple(self._members.values()):
                await self._leave(member, None)

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

    def view(self, prompt: Sequence[BlockHash]) -> ClusterView:
        """The workers to choose from, and what they hold of `prompt`."""
        members = self._members.values()
        prefill = [m for m in members if m.info.role is Role.PREFILL and m.monitor.is_reachable]
        decode = _usable([m for m in members if m.info.role is not Role.PREFILL])
        return ClusterView(
            prefill=tuple(self._view_of(member, prompt) for member in prefill),
            decode=tuple(self._view_of(member, prompt) for member in decode),
        )

    def dispatch(self, route: Route, kv_tokens: int, sequences: int) -> DispatchTicket:
        """Count an attempt at its workers, at once."""
        return self._loads.dispatch(
            self._clock.now(),
            prefill=route.computing.worker_id,
            decode=route.decode.worker_id,
            prefill_tokens=route.prefill_tokens,
            kv_tokens=kv_tokens,
            sequences=sequences,
        )

    def prefilled(self, ticket: DispatchTicket) -> None:
        """The first token of an attempt arrived."""
        self._loads.prefilled(ticket)

    def end(self, ticket: DispatchTicket) -> None:
        """An attempt is over."""
        self._loads.end(ticket)

    def client(self, worker_id: WorkerId) -> WorkerClient:
        """The connection to a worker of the last `view`."""
        return self._members[worker_id].client

    def kv_slots_max(self) -> int | None:
        """Slots of the largest worker that decodes and can be reached; None if unknown."""
        totals = [
            self._loads.slots_total(member.info.worker_id)
            for member in self._members.values()
            if member.monitor.is_reachable and member.info.role is not Role.PREFILL
        ]
        known = [total for total in totals if total]
        return max(known, default=None)

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

    def _join(self, info: WorkerInfo, client: WorkerClient, *, is_new: bool) -> None:
        if is_new:
            self._loads.add(info.worker_id)
        monitor = WorkerMonitor(
            info,
            client,
            loads=self._loads,
            index=self._index_of(info.role),
            clock=self._clock,
            interval_s=self._status_interval_s,
            on_reachable=self.readiness_changed.set,
        )
        self._members[info.worker_id] = _Member(client, monitor)
        monitor.start()

    async def _leave(self, member: _Member, successor: WorkerInfo | None) -> None:
        """Forget a worker; one that only changed its role keeps its connection and streams."""
        worker_id = member.info.worker_id
        del self._members[worker_id]
        if successor is not None and _is_same_process(successor, member.info):
            await member.monitor.stop()
            self._join(successor, member.client, is_new=False)
            return
        self._loads.remove(worker_id)
        member.client.abort_streams(WorkerUnavailable(f"worker {worker_id} left the cluster"))
        await member.monitor.stop()
        await member.client.close()
        _log.info("worker left", extra={"worker_id": worker_id})

    def _index_of(self, role: Role) -> PrefixIndex:
        return self._prefill_index if role is Role.PREFILL else self._decode_index

    def _view_of(self, member: _Member, prompt: Sequence[BlockHash]) -> WorkerView:
        worker_id = member.info.worker_id
        blocks = self._index_of(member.info.role).hit_blocks(worker_id, prompt)
        return WorkerView(
            info=member.info,
            hit_tokens=blocks * self._block_tokens,
            load=self._loads.estimate(worker_id),
        )

    def _summary_of(self, member: _Member) -> WorkerSummary:
        index = self._index_of(member.info.role)
        return WorkerSummary(
            info=member.info,
            is_reachable=member.monitor.is_reachable,
            status=member.monitor.last_status,
            indexed_blocks=index.block_count(member.info.worker_id),
        )


def _usable(members: list[_Member]) -> list[_Member]:
    """Those that answered last time. If nobody did, those that are only late: one late answer of
    the only worker must not refuse every request meanwhile."""
    reachable = [member for member in members if member.monitor.is_reachable]
    return reachable or [member for member in members if member.monitor.is_late]


async def _audit(client: WorkerClient) -> AuditReport | KvferryError:
    try:
        return await client.audit(AUDIT_TIMEOUT_S + AUDIT_CALL_GRACE_S)
    except KvferryError as error:
        return error


def _is_same_process(one: WorkerInfo, other: WorkerInfo) -> bool:
    return one.incarnation == other.incarnation and one.address == other.address
