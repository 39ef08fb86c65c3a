"""A real cluster in processes of its own, as a user starts it: `kvferry serve`.

The test's process never loads Ray; several clusters may run side by side.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.client import CallFailed, Client
from cluster.process_census import processes_of
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.rpc.v1 import inference_pb2 as inference

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0
_READY = re.compile(r"at (\S+) \(logs in (\S+)\), the OpenAI API at (\S+);")

SMALL: dict[str, object] = {
    "router.port": 0,
    "cache.memory_bytes": 192 * 2**20,
    "model.context_length": 4096,
    "restart_backoff_s": 0.2,
    "router.status_interval_s": 0.1,
}
"""Overrides that make a cluster quick to start and cheap to hold."""


class RunningCluster:
    """A cluster that serves, seen from outside."""

    def __init__(
        self, process: subprocess.Popen[str], address: str, directory: Path, openai_url: str
    ) -> None:
        self.process = process
        self.address = address
        self.directory = directory
        self.openai_url = openai_url
        self.expected_exit_code = 0

    def status(self) -> inference.ClusterStatusResponse:
        """What the router knows now. Raises `CallFailed` while there is none."""
        with Client(self.address) as client:
            return client.cluster_status()

    def worker(self, name: str) -> inference.WorkerSummary:
        """One worker by its id, such as "decode-0"."""
        (found,) = [entry for entry in self.status().workers if entry.worker_id == name]
        return found

    def wait_for_status(
        self, condition: Callable[[inference.ClusterStatusResponse], bool], timeout_s: float = 60.0
    ) -> inference.ClusterStatusResponse:
        """Ask until the condition holds; fails with the last status."""
        found: list[inference.ClusterStatusResponse] = []

        def holds() -> bool:
            with contextlib.suppress(CallFailed):  # the router itself may have been killed
                found[:] = [self.status()]
            return bool(found) and condition(found[0])

        wait_until("status", holds, timeout_s, state=lambda: found)
        return found[0]

    def kill(self, pid: int) -> None:
        """SIGKILL to a process of this cluster."""
        assert pid in {entry.pid for entry in processes_of(self.directory)}, f"{pid} is not ours"
        os.kill(pid, signal.SIGKILL)

    def logs(self) -> str:
        """The ends of all members' logs, for the message of a failed test."""
        parts = []
        for file in sorted(self.directory.glob("session_2*/logs/worker-*")):
            text = file.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                parts.append(f"--- {file.name}\n{text[-2000:]}")
        return "\n".join(parts)

    def all_logs(self) -> str:
        """Whatever any process of the cluster has written so far, Ray's own ones included."""
        files = [file for file in self.directory.glob("session_2*/logs/**/*") if file.is_file()]
        return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


@contextlib.contextmanager
def local_cluster(**overrides: object) -> Iterator[RunningCluster]:
    """`SMALL` with overrides, dots of names written as `__`; nothing is left of it at exit."""
    given = SMALL | {name.replace("__", "."): value for name, value in overrides.items()}
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "cluster.cli", "serve", *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    cluster = None
    try:
        cluster = _wait_until_ready(process)
        yield cluster
    except BaseException:
        if cluster is not None:
            print(cluster.logs(), file=sys.stderr)  # noqa: T201
        raise
    finally:
        _stop(process)
        if cluster is not None:
            assert_nothing_left(cluster.directory)
    assert process.returncode == cluster.expected_exit_code


def assert_nothing_left(directory: Path, within_s: float = 20.0) -> None:
    """No process of a cluster lives, and its directory is gone."""
    wait_until(
        "everything gone",
        lambda: not processes_of(directory) and not directory.exists(),
        within_s,
        state=lambda: processes_of(directory),
    )


def _wait_until_ready(process: subprocess.Popen[str]) -> RunningCluster:
    assert process.stdout is not None
    lines: list[str] = []
    # `kvferry serve` bounds its own start, so that this loop ends.
    for line in process.stdout:
        lines.append(line)
        found = _READY.search(line)
        if found is not None:
            return RunningCluster(process, found[1], Path(found[2]), found[3])
    raise AssertionError(f"kvferry serve ended with {process.wait()}: {''.join(lines)}")


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
