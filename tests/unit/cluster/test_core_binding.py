"""Binding is for good, so each test binds a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cluster.core_binding import bind_process

_PROGRAM = """
import os, sys, threading
from cluster.core_binding import bind_process

cores = {int(sys.argv[1])}
release = threading.Event()

def wait():
    release.wait(60)

earlier = threading.Thread(target=wait)
earlier.start()
bind_process(cores)
later = threading.Thread(target=wait)
later.start()
for thread in (threading.current_thread(), earlier, later):
    assert os.sched_getaffinity(thread.native_id) == cores, thread
release.set()
"""


def test_threads_that_run_already_and_those_to_come_are_bound():
    core = max(os.sched_getaffinity(0))
    subprocess.run([sys.executable, "-c", _PROGRAM, str(core)], check=True, timeout=30)


def test_a_core_that_is_not_there_is_named_and_nothing_changes():
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="there is no core 9999 here"):
        bind_process({min(before), 9999})
    assert os.sched_getaffinity(0) == before
