"""The trace of state changes: its lines, its file, and what a full disk does to it."""

from __future__ import annotations

import os

import pytest

from kv_transfer.protocol.key import HandoffKey
from kv_transfer.trace import HandoffTrace
from kvferry.clock import ManualClock
from kvferry.errors import ConfigError
from kvferry.ids import Attempt, Incarnation, RequestId, WorkerId

KEY = HandoffKey(RequestId("r1"), Attempt(2), Incarnation(3), Incarnation(4))


def new_trace(directory, clock) -> HandoffTrace:
    return HandoffTrace(str(directory / "trace"), WorkerId("decode-0"), clock)


def test_a_line_per_change_in_a_file_per_worker(tmp_path):
    clock = ManualClock(5.0)
    trace = new_trace(tmp_path, clock)
    trace("sink", KEY, "requested")
    clock.advance(0.25)
    trace("sink", KEY, "reserving")
    lines = (tmp_path / "trace.decode-0").read_text().splitlines()
    assert lines == ["5.000000 sink r1#2 requested", "5.250000 sink r1#2 reserving"]
    trace.close()


def test_a_restarted_worker_goes_on_in_the_same_file(tmp_path):
    for state in ("queued", "offered"):
        trace = new_trace(tmp_path, ManualClock())
        trace("source", KEY, state)
        trace.close()
    text = (tmp_path / "trace.decode-0").read_text()
    assert [line.split()[-1] for line in text.splitlines()] == ["queued", "offered"]


def test_a_file_that_cannot_be_opened_is_an_error_of_the_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"handoff.trace_file: cannot write .*decode-0"):
        new_trace(tmp_path / "missing", ManualClock())


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path, caplog):
    trace = new_trace(tmp_path, ManualClock())
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, trace._file)
    os.close(full)
    trace("source", KEY, "queued")
    trace("source", KEY, "offered")
    assert [record.reason for record in caplog.records] == ["[Errno 28] No space left on device"]


def test_nothing_is_written_after_close(tmp_path):
    trace = new_trace(tmp_path, ManualClock())
    trace.close()
    trace.close()
    trace("source", KEY, "queued")
    assert (tmp_path / "trace.decode-0").read_text() == ""
