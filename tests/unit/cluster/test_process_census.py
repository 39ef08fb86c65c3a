from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from cluster.process_census import ProcessEntry, kill_all, processes_of

_SLEEP = "import time; print(flush=True); time.sleep(60)"


@pytest.fixture
def sleeper(tmp_path):
    """A process whose only tie to the directory is an open file."""
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", _SLEEP], stdout=out)
    yield process
    process.kill()
    process.wait()


def test_a_process_with_an_open_file_there_is_found(sleeper, tmp_path):
    assert [entry.pid for entry in processes_of(tmp_path)] == [sleeper.pid]


def test_others_and_this_process_are_not_found(sleeper, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with (elsewhere / "mine").open("wb"):
        assert processes_of(elsewhere) == []


def test_a_killed_process_is_gone_even_as_a_zombie(sleeper, tmp_path):
    kill_all(processes_of(tmp_path))
    deadline = 200
    while processes_of(tmp_path) and deadline:
        time.sleep(0.01)
        deadline -= 1
    assert processes_of(tmp_path) == []


def test_a_reused_pid_is_left_alone(sleeper, tmp_path):
    (entry,) = processes_of(tmp_path)
    kill_all([ProcessEntry(entry.pid, entry.started + 1, entry.name)])
    os.kill(sleeper.pid, 0)
    time.sleep(0.05)
    assert sleeper.poll() is None
