from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import process_census
from cluster.process_census import MARK, ProcessEntry, kill_all, processes_of
from tests.support.waiting import wait_until

_SLEEP = "import time; print(flush=True); time.sleep(60)"


@pytest.fixture
def sleeper(tmp_path):
    """A process whose only tie to the directory is its mark."""
    process = start({MARK: str(tmp_path)})
    yield process
    end(process)


def start(environment, *arguments, stdout=subprocess.PIPE):
    process = subprocess.Popen(
        [sys.executable, "-c", _SLEEP, *arguments],
        stdout=stdout,
        env=os.environ | environment,
    )
    if process.stdout is not None:
        process.stdout.readline()
    return process


def end(process):
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def test_a_process_with_the_mark_is_found(sleeper, tmp_path):
    assert [entry.pid for entry in processes_of(tmp_path)] == [sleeper.pid]


def test_a_child_inherits_the_mark(tmp_path):
    spawn = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_SLEEP!r}])"
    parent = subprocess.Popen(
        [sys.executable, "-c", spawn],
        stdout=subprocess.PIPE,
        env=os.environ | {MARK: str(tmp_path)},
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    found = processes_of(tmp_path)
    kill_all(found)
    parent.wait()
    parent.stdout.close()
    assert len(found) == 2


def test_who_only_speaks_of_the_directory_is_left_alone(tmp_path):
    with (tmp_path / "out").open("wb") as log:
        reader = start({}, str(tmp_path), stdout=log)
    longer = start({MARK: f"{tmp_path}-2"})
    try:
        assert processes_of(tmp_path) == []
    finally:
        end(reader)
        end(longer)


def test_this_process_is_not_found(monkeypatch, tmp_path):
    monkeypatch.setenv(MARK, str(tmp_path))
    assert processes_of(tmp_path) == []


def test_a_process_that_vanishes_does_not_hide_the_others(monkeypatch, sleeper, tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    proc = Path("/proc")

    class Proc:
        def iterdir(self):
            return iter([proc / str(gone.pid), proc / str(sleeper.pid)])

    monkeypatch.setattr(process_census, "_PROC", Proc())
    assert [entry.pid for entry in processes_of(tmp_path)] == [sleeper.pid]


def test_a_killed_process_is_gone_even_as_a_zombie(sleeper, tmp_path):
    kill_all(processes_of(tmp_path))
    wait_until("gone", lambda: not processes_of(tmp_path))


def test_a_reused_pid_is_left_alone(sleeper, tmp_path):
    (entry,) = processes_of(tmp_path)
    kill_all([ProcessEntry(entry.pid, entry.started + 1, entry.name)])
    os.kill(sleeper.pid, 0)
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(timeout=0.05)
