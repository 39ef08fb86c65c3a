"""Differences of two runs are seen where they are, and not where they are not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.compare import Verdict, compare, same_requests
from bench.record import RunRecord, Targets
from tests.support.run_records import queued_run

TARGETS = Targets(2.0, 0.05)


def rows_of(a: RunRecord, b: RunRecord, **settings):
    comparison = compare(a, b, TARGETS, resamples=400, **settings)
    return comparison, {row.name: row for row in comparison.rows}


def test_a_run_beside_itself_differs_in_nothing() -> None:
    run = queued_run(seed=1)
    comparison, rows = rows_of(run, run)
    assert comparison.paired
    assert comparison.differs == ()
    for row in rows.values():
        assert row.ratio == pytest.approx(1.0)
        assert row.verdict is Verdict.NO_DIFFERENCE, row.name
        assert row.better is None


def test_what_is_slower_is_seen_with_its_size() -> None:
    comparison, rows = rows_of(queued_run(seed=1), queued_run(seed=1, slower=1.3))
    assert comparison.paired
    for name in ("TTFT mean", "TTFT p90", "ITL p50", "E2E mean"):
        assert rows[name].verdict is Verdict.HIGHER
        assert rows[name].better is False
    itl = rows["ITL mean"]
    assert itl.low is not None
    assert itl.high is not None
    assert itl.low <= 1.3 <= itl.high
    assert rows["hit rate"].verdict is Verdict.NO_DIFFERENCE
    assert rows["throughput"].verdict is Verdict.NO_DIFFERENCE


def test_other_arrivals_of_the_same_load_are_no_difference() -> None:
    comparison, rows = rows_of(queued_run(seed=1), queued_run(seed=2))
    assert not comparison.paired
    assert rows["TTFT p90"].verdict is Verdict.NO_DIFFERENCE
    assert rows["goodput"].verdict is Verdict.NO_DIFFERENCE


def test_the_same_seed_gives_the_same_intervals() -> None:
    a, b = queued_run(seed=1), queued_run(seed=2)
    assert rows_of(a, b)[0].as_json() == rows_of(a, b)[0].as_json()
    assert rows_of(a, b, seed=1)[0].as_json() != rows_of(a, b)[0].as_json()


def test_figures_are_those_of_the_summary() -> None:
    run = queued_run(seed=1, targets=TARGETS)
    _, rows = rows_of(run, queued_run(seed=2))
    assert rows["TTFT p99"].a == pytest.approx(run.summary["ttft_s"]["p99"])
    assert rows["ITL mean"].a == pytest.approx(run.summary["itl_mean_s"]["mean"])
    assert rows["throughput"].a == pytest.approx(run.summary["throughput"]["requests_per_s"])
    assert rows["goodput"].a == pytest.approx(run.summary["goodput"]["requests_per_s"])
    assert rows["hit rate"].a == pytest.approx(run.summary["hit_rate"])


def test_of_a_few_requests_nothing_is_said() -> None:
    _, rows = rows_of(queued_run(seed=1, count=5), queued_run(seed=2, count=5))
    assert {row.verdict for row in rows.values()} == {Verdict.UNKNOWN}
    _, rows = rows_of(queued_run(seed=1, count=0), queued_run(seed=2))
    assert rows["TTFT p50"].a is None
    assert rows["TTFT p50"].verdict is Verdict.UNKNOWN


def test_what_makes_a_comparison_unfair_is_told() -> None:
    a, b = queued_run(seed=1), queued_run(seed=1, refused=0.2)
    closed = dataclasses.replace(b.about, load={"mode": "closed", "clients": 4}, targets=TARGETS)
    comparison = compare(a, RunRecord(closed, b.requests), resamples=100)
    told = " ".join(comparison.notes)
    assert "who refuses more looks faster" in told
    assert "mode open" in told
    assert "no goodput is compared" in told
    assert ("load.mode", "open", "closed") in comparison.differs


def test_requests_are_the_same_in_any_order() -> None:
    run = queued_run(seed=1).requests
    turned = np.arange(len(run))[::-1]
    columns = {
        each.name: np.array(getattr(run, each.name), dtype=object)[turned]
        if isinstance(getattr(run, each.name), tuple)
        else getattr(run, each.name)[turned]
        for each in dataclasses.fields(run)
    }
    assert same_requests(run, type(run)(**columns))
    assert not same_requests(run, queued_run(seed=2).requests)
