"""A Ray cluster of several nodes, each a host of `namespaces` with its own address.

Ray runs as an operator starts it: `ray start` on each host, the head with its bookkeeping on disk.
A node can be killed, all its processes at once, and started again; so can the head.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.support.namespaces import Network
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.namespaces import Host

_PORT = 6379
_UP_WITHIN_S = 90.0
_BIN = Path(sys.executable).parent
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    # A node that answers that nobody is there is dead after 3 s. One that does not answer at all
    # fails two checks in the 20 s for which a test cuts it off, and one more when it is back.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "6",
    # Ray's processes end themselves when they have called the head in vain for so long.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}


class RayNode:
    """One node: a host and what `ray start` has started there."""

    def __init__(self, host: Host, head: Host, cpus: int, directory: Path) -> None:
        self.host = host
        self._head = head
        self._cpus = cpus
        self._directory = directory
        self._log = directory / f"{host.name}.log"
        self._already = 0
        """Characters of the log that are of earlier starts."""
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_head(self) -> bool:
        return self.host is self._head

    @property
    def address(self) -> str:
        return self.host.address

    def start(self) -> None:
        """`ray start`, until it is a node of the cluster."""
        self.launch()
        self.wait_until_up()

    def launch(self) -> None:
        """`ray start`, without waiting."""
        assert self._process is None, f"{self.host.name} runs already"
        where = (
            ("--head", f"--port={_PORT}", "--include-dashboard=false")
            if self.is_head
            else (f"--address={self._head.address}:{_PORT}",)
        )
        self._already = len(self._log.read_text()) if self._log.exists() else 0
        with self._log.open("a") as log:
            self._process = self.host.start(
                *(_BIN / "ray", "start", *where, f"--node-ip-address={self.address}"),
                *(f"--num-cpus={self._cpus}", f"--object-store-memory={80 * 2**20}"),
                *(f"--temp-dir={self._home}", "--disable-usage-stats"),
                "--block",
                env=node_environment() | self._bookkeeping(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_up(self) -> None:
        """Until it is a node of the cluster."""

        def is_up() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()
            return "Ray runtime started" in self._log.read_text()[self._already :]

        wait_until(f"Ray on {self.host.name}", is_up, _UP_WITHIN_S, state=self._log.read_text)

    def kill(self) -> None:
        """SIGKILL to all its processes: Ray's and ours."""
        self.host.kill()
        if self._process is not None:
            self._process.wait()
            self._process = None
        # A head that finds it looks at all processes of this machine, and takes those of other
        # hosts for a head of its own that still runs.
        (self._home / "ray_current_cluster").unlink(missing_ok=True)

    def supervises(self) -> bool:
        """Whether the cluster's supervisor runs here."""
        return any(_command(pid).startswith("ray::Supervisor") for pid in self.host.pids())

    def _bookkeeping(self) -> dict[str, str]:
        folder = self._directory / "bookkeeping"
        kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder)}
        return kept if self.is_head else {}

    @property
    def _home(self) -> Path:
        return self._directory / self.host.name

    def run(self, *arguments: object, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
        """`kvferry ...` on this node."""
        command = (sys.executable, "-m", "cluster.cli", *arguments)
        # Otherwise Ray asks a file that whatever starts Ray on this machine writes.
        address = {"RAY_ADDRESS": f"{self._head.address}:{_PORT}"}
        return self.host.run(*command, timeout_s=timeout_s, env=node_environment() | address)

    def logs(self, characters: int = 2000) -> str:
        """The ends of what our members on this node have written."""
        parts = []
        for file in sorted(self._home.glob("session_2*/logs/worker-*")):
            text = file.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                parts.append(f"--- {self.host.name}/{file.name}\n{text[-characters:]}")
        return "\n".join(parts)


class RayNodes:
    """The nodes, the head first; as a context manager, at whose end no process is left."""

    def __init__(self, count: int, cpus: int) -> None:
        """`cpus` of each node, which members may reserve."""
        # Short: Ray puts sockets below it, whose paths the system bounds.
        self._directory = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))
        self.network = Network(count)
        head = self.network.hosts[0]
        self.nodes = [RayNode(host, head, cpus, self._directory) for host in self.network.hosts]

    @property
    def head(self) -> RayNode:
        return self.nodes[0]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self._directory, ignore_errors=True)
            undo.enter_context(self.network)
            undo.callback(self._kill)
            self.head.start()
            for node in self.nodes[1:]:
                node.launch()
            for node in self.nodes[1:]:
                node.wait_until_up()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            print(self.logs(), file=sys.stderr)  # noqa: T201
        self._undo.close()

    def logs(self) -> str:
        """Of all nodes."""
        return "\n".join(node.logs() for node in self.nodes)

    def _kill(self) -> None:
        for node in self.nodes:
            node.kill()


def node_environment() -> dict[str, str]:
    """Of Ray's processes, and of commands on a node."""
    return dict(os.environ) | _ENVIRONMENT


def _command(pid: int) -> str:
    """Empty: it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""
