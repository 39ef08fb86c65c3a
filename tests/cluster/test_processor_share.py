"""What the processes of a real cluster may use of the machine's cores."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tests.support.local_cluster import local_cluster


def shares_of(pid: int) -> list[tuple[int, set[int]]]:
    """(nice value, cores) of each thread."""
    shares = []
    for entry in Path(f"/proc/{pid}/task").iterdir():
        thread = int(entry.name)
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            shares.append((os.getpriority(os.PRIO_PROCESS, thread), os.sched_getaffinity(thread)))
    assert shares, f"{pid} has no threads"
    return shares


def test_workers_keep_to_their_cores_and_are_no_lower_in_priority_than_their_owner():
    core = max(os.sched_getaffinity(0))
    with local_cluster(workers__decode__cores=core) as running:
        pids = {entry.worker_id: entry.pid for entry in running.status().workers}
        shares = {name: shares_of(pid) for name, pid in pids.items()}
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert {nice for of_worker in shares.values() for nice, _ in of_worker} == {ours}
    assert all(cores == {core} for _, cores in shares["decode-0"])
    assert all(cores == os.sched_getaffinity(0) for _, cores in shares["prefill-0"])
