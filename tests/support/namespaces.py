"""Several hosts on one machine: network namespaces on a bridge, each with its own address.

All but the network is this machine's. Tests reach hosts through the bridge's address. Nothing is
left at the end, also of a run that was killed: its hosts are removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFIX = "kvf-multinode"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\w+)")
_END_WITHIN_S = 10.0
_IP_TIMEOUT_S = 20.0


def why_not() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if shutil.which("ip") is None:
        return "needs `ip` (iproute2) for network namespaces"
    try:
        with Network(hosts=1):
            return None
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces, bridges and veth: {error.stderr.strip()}"


class Host:
    """One namespace."""

    def __init__(self, name: str, namespace: str, address: str) -> None:
        self.name = name
        self.namespace = namespace
        self.address = address

    def command(self, *arguments: object) -> list[str]:
        """That runs the arguments there."""
        return ["ip", "netns", "exec", self.namespace, *map(str, arguments)]

    def start(self, *arguments: object, **how: Any) -> subprocess.Popen[str]:
        """Run it there, without waiting."""
        return subprocess.Popen(self.command(*arguments), text=True, **how)

    def run(
        self, *arguments: object, timeout_s: float = 60.0, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run it there to its end."""
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            **how,
        )

    def pids(self) -> list[int]:
        """Of all that runs there."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """SIGKILL to all that runs there, until nothing does."""

        def is_dead() -> bool:
            pids = self.pids()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        wait_until(f"no process on {self.name}", is_dead, _END_WITHIN_S, state=self.pids)


class Network:
    """The hosts and the bridge between them, as a context manager."""

    def __init__(self, hosts: int) -> None:
        number = os.getpid()
        self._bridge = f"kvfb{number}"
        self._subnet = f"10.{200 + number % 50}.{number // 50 % 250}"
        self.gateway = f"{self._subnet}.1"
        """The tests' own address in this network."""
        self.hosts = [
            Host(name, f"{_PREFIX}-{number}-{name}", f"{self._subnet}.{10 + position}")
            for position, name in enumerate("abcdefgh"[:hosts])
        ]

    def __enter__(self) -> Self:
        _remove_orphans()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    def cut(self, host: Host) -> None:
        """Nothing goes to it or comes from it; its own wire looks whole."""
        _ip("link", "set", self._wire(host), "nomaster")

    def mend(self, host: Host) -> None:
        """As before."""
        _ip("link", "set", self._wire(host), "master", self._bridge)

    def _wire(self, host: Host) -> str:
        return f"{self._bridge}{host.name}"

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in self.hosts:
            wire = self._wire(host)
            _ip("netns", "add", host.namespace)
            _ip(*f"link add {wire} type veth peer name eth0 netns {host.namespace}".split())
            _ip("link", "set", wire, "master", self._bridge, "up")
            inside = ("-n", host.namespace)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "eth0", "up")
            # Leads nowhere; hosts find their own address by their way to anywhere.
            _ip(*inside, "route", "add", "default", "via", self.gateway)

    def _remove(self) -> None:
        """A namespace takes its end of the wire along, and that the other end."""
        there = _namespaces()
        for host in self.hosts:
            if host.namespace in there:
                host.kill()
                _ip("netns", "del", host.namespace)
        _remove_link(self._bridge)


def _remove_orphans() -> None:
    """What runs have left that were killed themselves."""
    for namespace in _namespaces():
        found = _NAME.fullmatch(namespace)
        if found is None or Path(f"/proc/{found[1]}").exists():
            continue
        Host(found[2], namespace, "").kill()
        _ip("netns", "del", namespace)
        _remove_link(f"kvfb{found[1]}")


def _remove_link(name: str) -> None:
    if (Path("/sys/class/net") / name).exists():
        _ip("link", "del", name)


def _namespaces() -> Sequence[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _ip(*arguments: str) -> str:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=_IP_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise subprocess.CalledProcessError(
            done.returncode, done.args, output=done.stdout, stderr=done.stderr
        )
    return done.stdout
