"""One worker as the router speaks to it: the interface. `grpc_worker_client` implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from kvferry.accounts import HostAccounts, KvAccounts, WorkerLoad
    from kvferry.audit_report import AuditReport
    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptOutput, AttemptRequest
    from kvferry.handoff_view import HandoffView
    from kvferry.ids import Incarnation
    from kvferry.kv_events import KvEventBatch
    from kvferry.tree_view import TreeQuery, TreeView


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's answer to a status call."""

    incarnation: Incarnation
    load: WorkerLoad
    accounts: KvAccounts
    host_accounts: HostAccounts | None
    """None without a host tier."""
    pid: int
    counters: Mapping[str, int]
    """What happened since the process started."""


class AttemptStream(Protocol):
    """The outputs of one attempt."""

    async def read(self) -> AttemptOutput | None:
        """The next output; None after the last one. Raises `KvferryError`.

        All that has come of a sample since the last read is one output.
        """
        ...

    def end_sample(self, sample: int) -> None:
        """Let the worker know that it need not go on with one sample; the others go on.

        A wish: if it is lost, what the worker still says of that sample is of no interest.
        """
        ...

    def abort(self, error: KvferryError) -> None:
        """End the attempt at the worker; a pending or later `read` raises `error`.

        Does nothing to an attempt that has ended. May be called at any time, any number of times.
        """
        ...


class WorkerClient(Protocol):
    """Calls to one worker process. Everything may raise `KvferryError`."""

    def generate(self, request: AttemptRequest, timeout_s: float) -> AttemptStream:
        """Start an attempt."""
        ...

    def kv_events(self) -> AsyncGenerator[KvEventBatch, None]:
        """KV events from now on, beginning with a snapshot."""
        ...

    async def status(self, timeout_s: float) -> WorkerStatus:
        """Ask for load and accounts."""
        ...

    async def audit(self, timeout_s: float) -> AuditReport:
        """Run every ledger check."""
        ...

    async def tree(self, query: TreeQuery, timeout_s: float) -> TreeView:
        """Look at a part of its index of KV."""
        ...

    async def handoffs(self, timeout_s: float) -> tuple[HandoffView, ...]:
        """Its handoffs that are not closed, oldest first."""
        ...

    def abort_streams(self, error: KvferryError) -> None:
        """End every attempt that is running here, because the worker is gone."""
        ...

    async def close(self) -> None:
        """Free the connection."""
        ...
