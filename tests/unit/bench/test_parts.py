from __future__ import annotations

from dataclasses import replace

import pytest

from bench.parts import duration_s, late_clients, merged, requests_of_rows
from bench.record import LoadMode, RecordError, requests_of_columns
from bench.summary import summarized
from tests.support.run_records import COLUMNS, an_about

ROWS = [{name: column[i] for name, column in COLUMNS.items()} for i in range(3)]


def test_the_warm_up_is_left_out_and_times_count_from_its_end():
    requests = requests_of_rows(ROWS[::-1], LoadMode.OPEN, 1.0)
    assert requests.index.tolist() == [1, 2]
    assert requests.scheduled_s.tolist() == pytest.approx([0.0, 1.0])
    assert requests.end_s.tolist() == pytest.approx([3.5, 1.25])
    assert duration_s(requests) == pytest.approx(3.5)


def test_a_closed_loop_warms_up_by_when_it_sent():
    assert requests_of_rows(ROWS, LoadMode.CLOSED, 1.2).index.tolist() == [1, 2]
    assert requests_of_rows(ROWS, LoadMode.OPEN, 1.2).index.tolist() == [2]


def test_the_client_that_was_late_is_named():
    requests = requests_of_columns(COLUMNS)
    (warning,) = late_clients(requests, [0, 1, 0])
    assert warning.startswith("client 1 sent late: p99 500 ms")
    assert late_clients(requests_of_rows([ROWS[0], ROWS[2]], LoadMode.OPEN, 0.0), [0, 0]) == []


def test_parts_of_nodes_become_the_run_that_they_are():
    whole = summarized(an_about(duration_s=4.5), requests_of_columns(COLUMNS))
    parts = [
        summarized(an_about(warnings=(text,)), requests_of_rows(rows, LoadMode.OPEN, 0.0))
        for text, rows in (("a", ROWS[1:2]), ("b", [ROWS[0], ROWS[2]]))
    ]
    found = merged(parts)
    assert found.summary == whole.summary
    assert found.requests.outcome == whole.requests.outcome
    assert found.about.warnings == ("a", "b")
    assert len(found.about.machine["nodes"]) == 2


def test_what_are_no_parts_of_one_run_is_refused():
    record = summarized(an_about(), requests_of_columns(COLUMNS))
    other = replace(record, about=an_about(seed=9))
    with pytest.raises(RecordError, match=r"^about\.seed: "):
        merged([record, other])
    with pytest.raises(RecordError, match=r"^requests\.index: 0 is in two"):
        merged([record, record])
