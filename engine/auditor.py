"""Runs every ledger check on a live worker: when asked, and after every so many steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.audit_report import AuditReport
from kvferry.limits import AUDIT_VIOLATIONS_MAX
from mem_cache.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.engine import Engine
    from kvferry.clock import Clock
    from kvferry.errors import KvferryError


@dataclass(frozen=True, slots=True)
class RunAudit:
    """Event: somebody wants to know now. `deliver` is called on the engine thread, once, unless
    the engine ends before it comes to this; it must not block."""

    deliver: Callable[[AuditReport], None]


class Auditor:
    """A `LoopPart`, so that no step is under way while it looks.

    What it finds when asked it reports, and the worker goes on. What it finds by itself, every
    `interval_steps` steps (0: never), ends the worker with the violations in its log, as any other
    broken invariant does.
    """

    def __init__(self, engine: Engine, clock: Clock, interval_steps: int) -> None:
        self._engine = engine
        self._clock = clock
        self._interval_steps = interval_steps
        self._audited_steps = engine.steps

    def handle(self, event: object) -> bool:
        """Takes `RunAudit`."""
        match event:
            case RunAudit(deliver):
                deliver(self._report())
            case _:
                return False
        return True

    def tick(self) -> None:
        """Audit if it is time again. Raises `LedgerError` for what is wrong."""
        steps = self._engine.steps
        if self._interval_steps and steps >= self._audited_steps + self._interval_steps:
            self._audited_steps = steps
            violations = self._violations()
            if violations:
                raise LedgerError(violations)

    def next_deadline(self) -> float | None:
        """None: its time is counted in steps, and `tick` is called before each."""
        return None

    def flush(self) -> None:
        """Nothing: reports leave as they are made."""

    def stop(self, error: KvferryError) -> None:
        """Nothing: who waits for a report asks by itself whether the engine lives."""

    def _report(self) -> AuditReport:
        started, kv_cache = self._clock.now(), self._engine.kv_cache
        return AuditReport(
            violations=_shortened(self._violations()),
            accounts=kv_cache.accounts(),
            host_accounts=kv_cache.host_accounts(),
            duration_ms=1000.0 * (self._clock.now() - started),
            engine_steps=self._engine.steps,
        )

    def _violations(self) -> tuple[str, ...]:
        """The checks of the ledger, and the one that only the engine can make: a row whose request
        has ended would never be given back, and looks like a live one to everybody else."""
        found: tuple[str, ...] = ()
        try:
            self._engine.kv_cache.audit()
        except LedgerError as error:
            found = error.violations
        live, holding = len(self._engine.kv_cache.live_requests()), self._engine.scheduler.holding
        if live != holding:
            found += (f"check 10: {live} rows are live, for {holding} requests that hold KV",)
        return found


def _shortened(violations: tuple[str, ...]) -> tuple[str, ...]:
    """One fault may show at every node of a tree; a report stays readable and below the size of
    a message."""
    left_out = len(violations) - AUDIT_VIOLATIONS_MAX
    if left_out <= 0:
        return violations
    return (*violations[:AUDIT_VIOLATIONS_MAX], f"and {left_out} more")
