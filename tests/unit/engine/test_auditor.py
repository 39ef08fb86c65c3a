"""Audits of a live engine: asked for between two steps, and by themselves every few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.auditor import Auditor, RunAudit
from kvferry.clock import ManualClock
from kvferry.limits import AUDIT_VIOLATIONS_MAX
from mem_cache.errors import LedgerError
from tests.support.engine_bench import EngineBench

if TYPE_CHECKING:
    from engine.engine import Engine
    from kvferry.audit_report import AuditReport

PROMPT = list(range(20, 40))


def _bench() -> EngineBench:
    """Without audits after every change: those of the auditor are what is looked at."""
    bench = EngineBench()
    bench.kv_cache.auditing = False
    return bench


def _ask(auditor: Auditor) -> AuditReport:
    reports: list[AuditReport] = []
    assert auditor.handle(RunAudit(reports.append))
    (report,) = reports
    return report


def _lose_a_page(engine: Engine) -> None:
    engine.kv_cache.allocator.alloc(engine.kv_cache.page_size)


def test_a_right_ledger_is_reported_with_its_accounts() -> None:
    bench = _bench()
    auditor = Auditor(bench.engine, ManualClock(), 0)
    bench.submit("r", PROMPT)
    bench.engine.step()
    report = _ask(auditor)
    assert report.violations == ()
    assert report.accounts == bench.kv_cache.accounts()
    assert report.accounts.rows_live == 1
    assert report.engine_steps == 1


def test_what_is_wrong_is_reported_and_the_engine_goes_on() -> None:
    bench = _bench()
    auditor = Auditor(bench.engine, ManualClock(), 0)
    _lose_a_page(bench.engine)
    report = _ask(auditor)
    assert any("lost" in violation for violation in report.violations)
    assert any(violation.startswith("check 8") for violation in report.violations)
    bench.submit("r", PROMPT)
    assert bench.engine.step()


def test_a_report_names_a_bounded_number_of_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _bench()
    many = [f"violation {number}" for number in range(AUDIT_VIOLATIONS_MAX + 5)]

    def audit() -> None:
        raise LedgerError(many)

    monkeypatch.setattr(bench.kv_cache, "audit", audit)
    report = _ask(Auditor(bench.engine, ManualClock(), 0))
    assert report.violations == (*many[:AUDIT_VIOLATIONS_MAX], "and 5 more")


def test_other_events_are_left_to_others() -> None:
    bench = _bench()
    assert not Auditor(bench.engine, ManualClock(), 0).handle("something else")


@pytest.mark.parametrize(("interval_steps", "audits"), [(0, 0), (1, 6), (2, 3), (6, 1), (7, 0)])
def test_it_audits_by_itself_every_so_many_steps(
    interval_steps: int, audits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _bench()
    auditor = Auditor(bench.engine, ManualClock(), interval_steps)
    found: list[int] = []
    monkeypatch.setattr(bench.kv_cache, "audit", lambda: found.append(bench.engine.steps))
    bench.submit("r", PROMPT, max_tokens=20)
    for _ in range(6):
        auditor.tick()
        auditor.tick()  # a turn without a step
        bench.engine.step()
    auditor.tick()
    assert bench.engine.steps == 6
    assert len(found) == audits


def test_what_it_finds_by_itself_ends_the_worker() -> None:
    bench = _bench()
    auditor = Auditor(bench.engine, ManualClock(), 1)
    bench.submit("r", PROMPT)
    bench.engine.step()
    auditor.tick()
    _lose_a_page(bench.engine)
    bench.engine.step()
    with pytest.raises(LedgerError, match="lost"):
        auditor.tick()


def test_a_row_whose_request_is_gone_is_found() -> None:
    bench = _bench()
    auditor = Auditor(bench.engine, ManualClock(), 1)
    request = bench.submit("r", PROMPT)
    bench.engine.step()
    auditor.tick()
    bench.engine.scheduler.remove(request)  # and its KV is never released
    assert _ask(auditor).violations == ("check 10: 1 rows are live, for 0 requests that hold KV",)
    bench.submit("s", PROMPT)
    bench.engine.step()
    with pytest.raises(LedgerError, match="check 10: 2 rows"):
        auditor.tick()
