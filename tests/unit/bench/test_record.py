from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from bench.record import (
    Outcome,
    RecordError,
    Targets,
    read_record,
    requests_of_columns,
    write_record,
)
from bench.summary import summarized, with_targets
from tests.support.run_records import COLUMNS, an_about


def test_a_record_comes_back_as_it_was_written(tmp_path):
    record = summarized(an_about(targets=Targets(1.0, 0.1)), requests_of_columns(COLUMNS))
    path = tmp_path / "run.json"
    write_record(record, path)
    found = read_record(path)
    assert found.about == record.about
    assert found.summary == json.loads(json.dumps(record.summary))
    assert found.requests.outcome == (Outcome.DONE, Outcome.DONE, Outcome.REFUSED)
    assert found.requests.error == (None, None, "RESOURCE_EXHAUSTED")
    for name, column in COLUMNS.items():
        assert len(getattr(found.requests, name)) == 3, name
        if isinstance(column[2], float | int):
            assert getattr(found.requests, name)[2] == column[2], name
    assert math.isnan(found.requests.first_token_s[2])
    assert list(tmp_path.iterdir()) == [path], "a partial file was left"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda it: it.pop("kvferry_run"), "kvferry_run"),
        (lambda it: it.update(kvferry_run=2), "kvferry_run"),
        (lambda it: it["about"].pop("seed"), "about.seed"),
        (lambda it: it["about"]["load"].update(mode="ajar"), "about.load.mode"),
        (lambda it: it["about"].update(kind="guessed"), "about.kind"),
        (lambda it: it["about"].update(targets={"ttft_s": 0, "itl_s": 1}), "about.targets.ttft_s"),
        (lambda it: it["requests"].pop("end_s"), "requests.end_s"),
        (lambda it: it["requests"]["end_s"].pop(), "requests.end_s"),
        (lambda it: it["requests"]["end_s"].__setitem__(1, "x"), "requests.end_s[1]"),
        (lambda it: it["requests"]["index"].__setitem__(0, None), "requests.index[0]"),
        (lambda it: it["requests"]["outcome"].__setitem__(2, "ok"), "requests.outcome[2]"),
        (lambda it: it["requests"]["error"].__setitem__(2, 7), "requests.error[2]"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, change, field):
    path = tmp_path / "run.json"
    write_record(summarized(an_about(), requests_of_columns(COLUMNS)), path)
    found = json.loads(path.read_text(encoding="utf-8"))
    change(found)
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(RecordError) as caught:
        read_record(path)
    assert caught.value.field == field


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path):
    path = tmp_path / "run.json"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_record(summarized(an_about(), requests_of_columns(COLUMNS)), path)
    assert list(tmp_path.iterdir()) == [path]


def test_waiting_counts_from_the_plan_but_in_a_closed_loop():
    requests = requests_of_columns(COLUMNS)
    open_loop, closed = an_about(), an_about(load={"mode": "closed"})
    assert requests.ttft_s(open_loop.mode)[1] == pytest.approx(1.5)
    assert requests.ttft_s(closed.mode)[1] == pytest.approx(1.0)
    assert requests.e2e_s(open_loop.mode)[1] == pytest.approx(3.5)
    assert requests.e2e_s(closed.mode)[1] == pytest.approx(3.0)
    assert requests.late_s.tolist() == pytest.approx([0.0, 0.5, 0.0])


def test_the_summary_is_of_complete_answers_and_counts_the_others():
    requests = requests_of_columns(COLUMNS)
    summary = summarized(an_about(), requests).summary
    assert summary["requests"] == {"all": 3, "done": 2, "refused": 1, "failed": 0, "cancelled": 0}
    assert summary["ttft_s"]["p50"] == pytest.approx(np.median([0.5, 1.5]))
    assert summary["hit_rate"] == pytest.approx(96 / 300)
    assert summary["moved_bytes"] == 4096
    assert summary["throughput"]["requests_per_s"] == pytest.approx(2 / 10)
    assert summary["throughput"]["answer_tokens_per_s"] == pytest.approx(12 / 10)
    assert summary["goodput"] is None


@pytest.mark.parametrize(
    ("targets", "held"),
    [
        (Targets(2.0, 0.3), 2),
        (Targets(1.0, 0.3), 1),
        # One token has no gaps: only the first answer misses this.
        (Targets(2.0, 0.1), 1),
        (Targets(0.1, 0.1), 0),
    ],
)
def test_goodput_asks_for_both_targets(targets, held):
    record = with_targets(summarized(an_about(), requests_of_columns(COLUMNS)), targets)
    assert record.summary["goodput"]["requests_per_s"] == pytest.approx(held / 10)
    assert record.summary["goodput"]["share"] == pytest.approx(held / 3)


def test_a_run_without_any_answer_has_no_latencies():
    columns = {name: [] for name in COLUMNS}
    summary = summarized(replace(an_about(), duration_s=0.0), requests_of_columns(columns)).summary
    assert summary["ttft_s"]["p99"] is None
    assert summary["hit_rate"] is None
    assert summary["throughput"]["requests_per_s"] is None
