"""What each worker has to do: its own report, corrected by what this router did since. Pure.

A report is as old as the last status call. Work that was sent after that call began is added at
once, and work that is known to have ended since is taken off, so that a burst of requests
spreads over the workers although none of them has reported yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.accounts import WorkerLoad

if TYPE_CHECKING:
    from kvferry.accounts import KvAccounts
    from kvferry.ids import WorkerId


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """One worker's load as far as this router can know it now."""

    prefill_tokens: int = 0
    """Prompt tokens to be computed before a new prompt."""
    sequences: int = 0
    """Requests being decoded or waiting for it."""
    requests: int = 0
    """Those, and the prompts of this router that it computes for others."""
    active_tokens: int = 0
    """Of the prompts and answers that this router has in flight there."""
    prefill_tokens_per_s: float = 0.0
    """0: not measured yet."""
    link_bytes_per_s: float = 0.0
    """0: not measured yet."""
    kv_slots_available: int | None = None
    """Free and evictable slots; None before the first report."""
    kv_slots_total: int | None = None
    """None before the first report."""


@dataclass(slots=True, eq=False)
class _WorkerEntry:
    load: WorkerLoad = field(default_factory=WorkerLoad)
    asked_at: float = float("-inf")
    slots_available: int | None = None
    slots_total: int | None = None
    tickets: set[DispatchTicket] = field(default_factory=set)
    prefilled_since: int = 0
    """Reported prompt tokens that are known to be computed by now."""
    ended_since: int = 0
    """Reported sequences that are known to have ended by now."""
    estimate: LoadEstimate | None = None
    """None: something changed since it was made. Every request asks for that of every worker."""


@dataclass(slots=True, eq=False)
class DispatchTicket:
    """One attempt in flight, counted at its workers from dispatch to end."""

    dispatched_at: float
    prefill: _WorkerEntry
    decode: _WorkerEntry
    prefill_tokens: int
    """0 once the prompt is computed."""
    kv_tokens: int
    sequences: int
    """Samples to be decoded."""


class LoadBook:
    """The load of every worker."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _WorkerEntry] = {}

    def add(self, worker_id: WorkerId) -> None:
        """A worker joined, or came back as a new process: nothing is known of it."""
        self._workers[worker_id] = _WorkerEntry()

    def remove(self, worker_id: WorkerId) -> None:
        """A worker left. Tickets that name it stay valid and count nowhere."""
        self._workers.pop(worker_id, None)

    def report(
        self, worker_id: WorkerId, asked_at: float, load: WorkerLoad, accounts: KvAccounts
    ) -> None:
        """Take the answer to a status call that began at `asked_at`."""
        entry = self._workers.get(worker_id)
        if entry is None:
            return
        entry.load = load
        entry.asked_at = asked_at
        entry.slots_available = accounts.free + accounts.evictable
        entry.slots_total = accounts.total
        entry.prefilled_since = 0
        entry.ended_since = 0
        entry.estimate = None

    def dispatch(
        self,
        now: float,
        *,
        prefill: WorkerId,
        decode: WorkerId,
        prefill_tokens: int,
        kv_tokens: int,
        sequences: int = 1,
    ) -> DispatchTicket:
        """Count an attempt at its workers from now on; the two may be the same worker."""
        ticket = DispatchTicket(
            dispatched_at=now,
            prefill=self._workers[prefill],
            decode=self._workers[decode],
            prefill_tokens=prefill_tokens,
            kv_tokens=kv_tokens,
            sequences=sequences,
        )
        ticket.prefill.tickets.add(ticket)
        ticket.decode.tickets.add(ticket)
        ticket.prefill.estimate = ticket.decode.estimate = None
        return ticket

    def prefilled(self, ticket: DispatchTicket) -> None:
        """The first token arrived, so the prompt is computed. May be told again."""
        if not ticket.prefill_tokens:
            return
        if ticket.dispatched_at <= ticket.prefill.asked_at:
            ticket.prefill.prefilled_since += ticket.prefill_tokens
        ticket.prefill_tokens = 0
        ticket.prefill.estimate = None

    def end(self, ticket: DispatchTicket) -> None:
        """The attempt is over, however it ended."""
        assert ticket in ticket.decode.tickets, "an attempt ends once"
        self.prefilled(ticket)
        if ticket.dispatched_at <= ticket.decode.asked_at:
            ticket.decode.ended_since += ticket.sequences
        ticket.prefill.tickets.discard(ticket)
        ticket.decode.tickets.discard(ticket)
        ticket.prefill.estimate = ticket.decode.estimate = None

    def slots_total(self, worker_id: WorkerId) -> int | None:
        """KV slots of the worker; None before its first report."""
        entry = self._workers.get(worker_id)
        return None if entry is None else entry.slots_total

    def estimate(self, worker_id: WorkerId) -> LoadEstimate:
        """The load now."""
        entry = self._workers[worker_id]
        if entry.estimate is None:
            entry.estimate = _estimate(entry)
        return entry.estimate


def _estimate(entry: _WorkerEntry) -> LoadEstimate:
    reported = entry.load
    fresh = [ticket for ticket in entry.tickets if ticket.dispatched_at > entry.asked_at]
    prefill = sum(ticket.prefill_tokens for ticket in fresh if ticket.prefill is entry)
    decoding = [ticket for ticket in fresh if ticket.decode is entry]
    slots = entry.slots_available
    if slots is not None:
        slots = max(0, slots - sum(ticket.kv_tokens for ticket in decoding))
    sequences = max(0, reported.running + reported.waiting - entry.ended_since)
    sequences += sum(ticket.sequences for ticket in decoding)
    computed_for_others = [
        ticket for ticket in fresh if ticket.decode is not entry and ticket.prefill_tokens
    ]
    active = (t for t in entry.tickets if t.decode is entry or t.prefill_tokens)
    return LoadEstimate(
        prefill_tokens=max(0, reported.waiting_tokens - entry.prefilled_since) + prefill,
        sequences=sequences,
        requests=sequences + len(computed_for_others),
        active_tokens=sum(ticket.kv_tokens for ticket in active),
        prefill_tokens_per_s=reported.prefill_tokens_per_s,
        link_bytes_per_s=reported.link_bytes_per_s,
        kv_slots_available=slots,
        kv_slots_total=entry.slots_total,
    )
