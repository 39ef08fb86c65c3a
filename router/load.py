"""What each worker has to do: its own report, corrected by what this router did since. Pure.

A report is as old as the last status call. Work that was sent after that call began is added at
once, and work that is known to have ended since is taken off, so that a burst of requests
spreads over the workers although none of them has reported yet.

Every request looks at every worker, and changes two of them. So the loads are kept in arrays with
a row per worker, of which a look copies those it asks for; a change counts itself and writes one
row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.accounts import WorkerLoad

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvferry.accounts import KvAccounts
    from kvferry.ids import WorkerId

SLOTS_UNKNOWN = 2**62
"""Free slots of a worker that has not reported yet: more than any request needs."""

PREFILL_TOKENS, SEQUENCES, REQUESTS, ACTIVE_TOKENS, SLOTS_AVAILABLE = 0, 1, 2, 3, 4
SLOTS_TOTAL, FIRST_TOKENS, _COUNTS = 5, 6, 7
PREFILL_RATE, LINK_RATE, JOINED, _RATES = 0, 1, 2, 3
"""Columns of `Loads`, and how many there are."""
_ROWS_MIN = 64


class Loads(NamedTuple):
    """Of some workers, as far as this router can know it now; a row each, in the same order."""

    counts: NDArray[np.int64]
    """[workers, 7]: the first seven below."""
    rates: NDArray[np.float64]
    """[workers, 3]: the last two, and when the worker joined, in seconds."""

    @property
    def prefill_tokens(self) -> NDArray[np.int64]:
        """Prompt tokens to be computed before a new prompt."""
        return self._counted(PREFILL_TOKENS)

    @property
    def sequences(self) -> NDArray[np.int64]:
        """Requests being decoded or waiting for it."""
        return self._counted(SEQUENCES)

    @property
    def requests(self) -> NDArray[np.int64]:
        """Those, and the prompts of this router that it computes for others."""
        return self._counted(REQUESTS)

    @property
    def active_tokens(self) -> NDArray[np.int64]:
        """Of the prompts and answers that this router has in flight there."""
        return self._counted(ACTIVE_TOKENS)

    @property
    def slots_available(self) -> NDArray[np.int64]:
        """Free and evictable slots; `SLOTS_UNKNOWN` before the first report."""
        return self._counted(SLOTS_AVAILABLE)

    @property
    def slots_total(self) -> NDArray[np.int64]:
        """0 before the first report."""
        return self._counted(SLOTS_TOTAL)

    @property
    def first_tokens(self) -> NDArray[np.int64]:
        """Of `prefill_tokens` those of prompts of this router that go first."""
        return self._counted(FIRST_TOKENS)

    @property
    def prefill_tokens_per_s(self) -> NDArray[np.float64]:
        """0: not measured yet."""
        return self._measured(PREFILL_RATE)

    @property
    def link_bytes_per_s(self) -> NDArray[np.float64]:
        """0: not measured yet."""
        return self._measured(LINK_RATE)

    def _counted(self, number: int) -> NDArray[np.int64]:
        column: NDArray[np.int64] = self.counts[:, number]
        return column

    def _measured(self, number: int) -> NDArray[np.float64]:
        column: NDArray[np.float64] = self.rates[:, number]
        return column

    def for_first(self) -> Loads:
        """As a prompt finds them that goes first: the others do not come before it."""
        counts = self.counts.copy()
        counts[:, PREFILL_TOKENS] = self.first_tokens
        return Loads(counts, self.rates)

    def take(self, positions: NDArray[np.intp]) -> Loads:
        """Of the workers at these positions, a copy."""
        return Loads(self.counts.take(positions, axis=0), self.rates.take(positions, axis=0))

    def part(self, start: int, stop: int) -> Loads:
        """Of the workers at the positions from `start` to `stop`."""
        return Loads(self.counts[start:stop], self.rates[start:stop])


@dataclass(slots=True, eq=False)
class _WorkerEntry:
    row: int
    joined_at: float
    is_member: bool = True
    """False: it left, and its row may be another worker's."""
    load: WorkerLoad = field(default_factory=WorkerLoad)
    asked_at: float = float("-inf")
    slots_available: int = SLOTS_UNKNOWN
    slots_total: int = 0
    tickets: set[DispatchTicket] = field(default_factory=set)
    prefilled_since: int = 0
    """Reported prompt tokens that are known to be computed by now."""
    ended_since: int = 0
    """Reported sequences that are known to have ended by now."""
    # Sums over tickets: of those that the report cannot know yet, but for `active_tokens`.
    new_prefill_tokens: int = 0
    new_sequences: int = 0
    new_kv_tokens: int = 0
    new_for_others: int = 0
    """Prompts computed for other workers."""
    active_tokens: int = 0
    first_tokens: int = 0

    def count(self, ticket: DispatchTicket, times: int) -> None:
        """Add a ticket to the sums, or take it off: `times` is 1 or -1."""
        decodes = ticket.decode is self
        if decodes or ticket.prefill_tokens:
            self.active_tokens += times * ticket.kv_tokens
        if ticket.goes_first and ticket.prefill is self:
            self.first_tokens += times * ticket.prefill_tokens
        if ticket.dispatched_at <= self.asked_at:
            return
        if ticket.prefill is self:
            self.new_prefill_tokens += times * ticket.prefill_tokens
        if decodes:
            self.new_sequences += times * ticket.sequences
            self.new_kv_tokens += times * ticket.kv_tokens
        elif ticket.prefill_tokens:
            self.new_for_others += times

    def count_anew(self) -> None:
        """After a report: fewer tickets are beyond it."""
        self.new_prefill_tokens = self.new_sequences = self.new_kv_tokens = 0
        self.new_for_others = self.active_tokens = self.first_tokens = 0
        for ticket in self.tickets:
            self.count(ticket, 1)

    def counts(self) -> tuple[int, ...]:
        """The row of `Loads.counts`."""
        reported = self.load
        sequences = max(0, reported.running + reported.waiting - self.ended_since)
        sequences += self.new_sequences
        prefill = max(0, reported.waiting_tokens - self.prefilled_since) + self.new_prefill_tokens
        return (
            prefill,
            sequences,
            sequences + self.new_for_others,
            self.active_tokens,
            max(0, self.slots_available - self.new_kv_tokens),
            self.slots_total,
            self.first_tokens,
        )


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
    goes_first: bool = False
    """Its prompt is computed before those that do not."""

    @property
    def workers(self) -> tuple[_WorkerEntry, ...]:
        """Each once."""
        return (self.decode,) if self.prefill is self.decode else (self.prefill, self.decode)


class LoadBook:
    """The load of every worker."""

    def __init__(self) -> None:
        self.changes = 0
        """Rises whenever anything here changed."""
        self._workers: dict[WorkerId, _WorkerEntry] = {}
        self._counts = np.zeros((_ROWS_MIN, _COUNTS), dtype=np.int64)
        self._rates = np.zeros((_ROWS_MIN, _RATES), dtype=np.float64)
        self._free_rows: list[int] = list(range(_ROWS_MIN))

    def add(self, worker_id: WorkerId, now: float = float("-inf")) -> None:
        """A worker joined, or came back as a new process: nothing is known of it. It has nothing of
        what was sent to its name before `now`."""
        self.remove(worker_id)
        if not self._free_rows:
            rows = self._counts.shape[0]
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._rates = np.concatenate((self._rates, np.zeros_like(self._rates)))
            self._free_rows.extend(range(rows, 2 * rows))
        entry = self._workers[worker_id] = _WorkerEntry(self._free_rows.pop(), now)
        self._write(entry)

    def remove(self, worker_id: WorkerId) -> None:
        """A worker left. Tickets that name it stay valid and count nowhere."""
        entry = self._workers.pop(worker_id, None)
        if entry is not None:
            entry.is_member = False
            self._free_rows.append(entry.row)
            self.changes += 1

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
        entry.count_anew()
        self._write(entry)

    def dispatch(
        self,
        now: float,
        *,
        prefill: WorkerId,
        decode: WorkerId,
        prefill_tokens: int,
        kv_tokens: int,
        sequences: int = 1,
        goes_first: bool = False,
    ) -> DispatchTicket:
        """Count an attempt at its workers from now on; the two may be the same worker."""
        ticket = DispatchTicket(
            dispatched_at=now,
            prefill=self._workers[prefill],
            decode=self._workers[decode],
            prefill_tokens=prefill_tokens,
            kv_tokens=kv_tokens,
            sequences=sequences,
            goes_first=goes_first,
        )
        for entry in ticket.workers:
            entry.tickets.add(ticket)
            entry.count(ticket, 1)
            self._write(entry)
        return ticket

    def prefilled(self, ticket: DispatchTicket) -> None:
        """The first token arrived, so the prompt is computed. May be told again."""
        if not ticket.prefill_tokens:
            return
        for entry in ticket.workers:
            entry.count(ticket, -1)
        if ticket.dispatched_at <= ticket.prefill.asked_at:
            ticket.prefill.prefilled_since += ticket.prefill_tokens
        ticket.prefill_tokens = 0
        for entry in ticket.workers:
            entry.count(ticket, 1)
            self._write(entry)

    def end(self, ticket: DispatchTicket) -> None:
        """The attempt is over, however it ended."""
        assert ticket in ticket.decode.tickets, "an attempt ends once"
        self.prefilled(ticket)
        if ticket.dispatched_at <= ticket.decode.asked_at:
            ticket.decode.ended_since += ticket.sequences
        for entry in ticket.workers:
            entry.count(ticket, -1)
            entry.tickets.discard(ticket)
            self._write(entry)

    def active_tokens(self, worker_id: WorkerId) -> int:
        """Of the prompts and answers that this router has in flight there; 0 for a stranger."""
        entry = self._workers.get(worker_id)
        return 0 if entry is None else entry.active_tokens

    def rows_of(self, worker_ids: Iterable[WorkerId]) -> NDArray[np.intp]:
        """Where these workers are; until one of them is added again or removed."""
        return np.array([self._workers[name].row for name in worker_ids], dtype=np.intp)

    def loads(self, rows: NDArray[np.intp]) -> Loads:
        """The loads at these rows now; a copy."""
        return Loads(self._counts.take(rows, axis=0), self._rates.take(rows, axis=0))

    def _write(self, entry: _WorkerEntry) -> None:
        if not entry.is_member:
            return
        self.changes += 1
        self._counts[entry.row] = entry.counts()
        load, joined_at = entry.load, entry.joined_at
        self._rates[entry.row] = load.prefill_tokens_per_s, load.link_bytes_per_s, joined_at
