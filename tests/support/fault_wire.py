"""A network between namespaces whose wires can be cut, slowed and made lossy.

A worker lives in a network namespace of its own that only its process refers to, so nothing can
be left of it. Its one interface is a TUN device; the *wire*, a process, holds the other ends and
carries IP packets from one to the other, by rules for each pair. It does what veth and
`tc netem` would, also where the kernel has no netem.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing import reduction
from typing import TYPE_CHECKING

from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_CLONE_NEWNET = 0x4000_0000
_TUNSETIFF = 0x4004_54CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKET_MAX = 65536
_SOURCE, _DESTINATION = slice(12, 16), slice(16, 20)
"""Of an IPv4 header."""
_IP_VERSION = 4
_DONE, _OBEY_S = "done", 20.0
_QUEUE_MAX = 10_000
"""Packets under way; more are lost, as in any router."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to packets between two addresses, in both directions."""

    loss: float = 0.0
    """Share of packets that vanish; 1: the wire is cut."""
    delay_s: float = 0.0


CUT = Rule(loss=1.0)


@dataclass(frozen=True, slots=True)
class _Attach:
    address: str


@dataclass(frozen=True, slots=True)
class _Detach:
    address: str


@dataclass(frozen=True, slots=True)
class _SetRule:
    pair: frozenset[str]
    """Two addresses, or one: all of its wires."""
    rule: Rule | None


def enter_namespace(address: str, control: Connection) -> None:
    """Move this process, of one thread, into a new namespace; its wire's end goes to `control`."""
    device = _new_namespace(address)
    control.send("device")
    reduction.send_handle(control, device, os.getppid())
    os.close(device)


def _new_namespace(address: str) -> int:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    return open_device("kvf0", address)


def open_device(name: str, address: str) -> int:
    """A TUN device of this process's namespace, up, with an address; its file."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, request)
    commands = f"link set lo up\naddr add {address}/24 dev {name}\nlink set {name} up mtu 1500\n"
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    return device


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    command = [sys.executable, "-m", "tests.support.fault_wire"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode == 0:
        return None
    reason = tried.stderr.strip().splitlines()[-1]
    return f"needs root, `ip` and /dev/net/tun for network namespaces: {reason}"


class Wire:
    """The harness's end of the wire's process."""

    def __init__(self, control: Connection, pid: int) -> None:
        self._control = control
        self._pid = pid
        self._lock = threading.Lock()

    def attach(self, address: str, device: int) -> None:
        """Carry packets of this device. Takes the file over."""
        with self._lock:
            self._control.send(_Attach(address))
            reduction.send_handle(self._control, device, self._pid)
            self._wait_done()
        os.close(device)

    def detach(self, address: str) -> None:
        """That device is gone."""
        self._tell(_Detach(address))

    def set_rule(self, rule: Rule | None, *addresses: str) -> None:
        """For the wire between two addresses, or for all of one; None: as new. At once."""
        self._tell(_SetRule(frozenset(addresses), rule))

    def _tell(self, command: object) -> None:
        with self._lock:
            self._control.send(command)
            self._wait_done()

    def _wait_done(self) -> None:
        assert self._control.poll(_OBEY_S), "the wire's process does not answer"
        assert self._control.recv() == _DONE


def run_wire(control: Connection, seed: int) -> None:
    """The main function of the wire's process; ends with the other end of `control`."""
    _Carrier(control, random.Random(seed)).run()


class _Carrier:
    def __init__(self, control: Connection, rng: random.Random) -> None:
        self._control = control
        self._rng = rng
        self._clock = MonotonicClock()
        self._selector = selectors.DefaultSelector()
        self._devices: dict[bytes, int] = {}
        self._rules: dict[frozenset[bytes], Rule] = {}
        self._under_way: list[tuple[float, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select(self._wait_s()):
                if key.data is None:
                    try:
                        self._obey(self._control.recv())
                        self._control.send(_DONE)
                    except (EOFError, OSError):
                        return
                else:
                    self._take(key.fd, key.data)
            self._deliver_due()

    def _wait_s(self) -> float | None:
        if not self._under_way:
            return None
        return max(0.0, self._under_way[0][0] - self._clock.now())

    def _obey(self, command: object) -> None:
        match command:
            case _Attach(address):
                device = reduction.recv_handle(self._control)
                self._drop(socket.inet_aton(address))
                os.set_blocking(device, False)
                self._devices[socket.inet_aton(address)] = device
                self._selector.register(device, selectors.EVENT_READ, socket.inet_aton(address))
            case _Detach(address):
                self._drop(socket.inet_aton(address))
            case _SetRule(pair, rule):
                wires = frozenset(socket.inet_aton(address) for address in pair)
                self._rules.pop(wires, None)
                if rule is not None:
                    self._rules[wires] = rule

    def _drop(self, address: bytes) -> None:
        device = self._devices.pop(address, None)
        if device is not None:
            self._selector.unregister(device)
            os.close(device)

    def _take(self, device: int, address: bytes) -> None:
        """Read what a device sends; a device whose namespace is gone is forgotten."""
        try:
            while True:
                self._carry(os.read(device, _PACKET_MAX))
        except BlockingIOError:
            return
        except OSError:
            self._drop(address)

    def _carry(self, packet: bytes) -> None:
        if packet[0] >> 4 != _IP_VERSION:
            return
        source, target = packet[_SOURCE], packet[_DESTINATION]
        delay_s = 0.0
        for wires in (frozenset({source, target}), frozenset({source}), frozenset({target})):
            rule = self._rules.get(wires)
            if rule is None:
                continue
            if rule.loss and self._rng.uniform(0, 1) < rule.loss:
                return
            delay_s += rule.delay_s
        if delay_s == 0.0:
            self._deliver(packet)
        elif len(self._under_way) < _QUEUE_MAX:
            self._count += 1
            heapq.heappush(self._under_way, (self._clock.now() + delay_s, self._count, packet))

    def _deliver_due(self) -> None:
        now = self._clock.now()
        while self._under_way and self._under_way[0][0] <= now:
            self._deliver(heapq.heappop(self._under_way)[2])

    def _deliver(self, packet: bytes) -> None:
        device = self._devices.get(packet[_DESTINATION])
        if device is not None:
            # A full or vanished device loses packets, like any other.
            with contextlib.suppress(OSError):
                os.write(device, packet)


if __name__ == "__main__":
    _new_namespace("10.254.254.254")
