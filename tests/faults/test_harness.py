"""The harness itself: what must not happen would be noticed; 300 faults are 300 faults."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.support.digest_model import answer
from tests.support.fault_cluster import alive
from tests.support.fault_load import Outcome, Question
from tests.support.fault_model import HEADS, LAYERS, digested
from tests.support.fault_plan import network_faults, process_faults, ray_faults
from tests.support.fault_trace import TraceTail

QUESTION = Question((1, 2), (3, 4, 5))


def problem_of(tokens, code="OK", took_s=1.0):
    return Outcome(QUESTION, tokens, code, "why", took_s, 0.0).problem(end_within_s=10.0)


@pytest.mark.parametrize(
    ("tokens", "code", "took_s"),
    [((3, 4, 5), "OK", 1.0), ((3, 4), "UNAVAILABLE", 1.0), ((), "UNAVAILABLE", 9.0)],
)
def test_a_right_answer_or_a_clear_error_is_no_problem(tokens, code, took_s):
    assert problem_of(tokens, code, took_s) is None


@pytest.mark.parametrize(
    ("tokens", "code", "took_s", "problem"),
    [
        ((3, 9, 5), "OK", 1.0, "WRONG TOKENS"),
        ((3, 9), "UNAVAILABLE", 1.0, "WRONG TOKENS"),
        ((3, 4, 5, 6), "OK", 1.0, "WRONG TOKENS"),
        ((3, 4), "OK", 1.0, "CUT SHORT"),
        ((3, 4, 5), "OK", 11.0, "HANG"),
        ((3,), "DEADLINE_EXCEEDED", 11.0, "HANG"),
        ((3,), "INTERNAL", 1.0, "UNCLEAR ERROR"),
    ],
)
def test_anything_else_is_one(tokens, code, took_s, problem):
    assert problem_of(tokens, code, took_s).startswith(problem)


def test_one_wrong_number_anywhere_in_the_kv_changes_what_is_read():
    tokens = np.array([5, 6, 7])
    values = np.broadcast_to(np.stack([tokens, np.arange(3)], axis=1)[:, None], (3, HEADS, 2))
    values = np.ascontiguousarray(np.broadcast_to(values, (LAYERS, 2, 3, HEADS, 2)))
    assert digested(values) == [5, 6, 7]
    for place in np.ndindex(values.shape):
        wrong = values.copy()
        wrong[place] += 1
        assert digested(wrong) != [5, 6, 7], place


def test_a_wrong_token_in_the_context_changes_the_answer():
    assert answer([1, 2, 3, 4], 4) != answer([1, 2, 4, 4], 4)


def test_there_are_300_faults_each_with_a_name_of_its_own():
    kinds = (process_faults(), network_faults(), ray_faults())
    assert sum(map(len, kinds)) == 300
    assert all(len({str(fault) for fault in kind}) == len(kind) for kind in kinds)


def test_the_tail_of_a_trace_sees_whole_new_lines_only(tmp_path):
    file = tmp_path / "trace.decode-0"
    file.write_text("1.0 sink r0#1 requested\n")
    tail = TraceTail(tmp_path / "trace")
    with file.open("a") as stream:
        stream.write("2.0 sink r1#1 requested\n3.0 sink r1#1 rece")
    (tmp_path / "trace.prefill-1").write_text("2.5 source r1#1 queued\n")
    assert tail.wait_for("sink", "requested", 1.0).handoff == "r1#1"
    assert tail.worker_of("r1#1", "source", 1.0) == "prefill-1"
    with pytest.raises(AssertionError, match="not traced within"):
        tail.wait_for("sink", "receiving", 0.01)
    with file.open("a") as stream:
        stream.write("iving\n")
    assert tail.wait_for("sink", "receiving", 1.0).at_s == 3.0


def test_a_process_that_runs_is_seen():
    assert alive([os.getpid()]) == [os.getpid()]
    assert alive([2**22 + 1]) == []
