"""A Unix connection between two processes of one host and user, and records on it.

The address is a random name in the abstract namespace: it is in no file system, belongs to the
network namespace, and is gone with the socket. Names can be listed by anyone on the host, so what
admits a peer is its user, which the kernel vouches for.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_CREDENTIALS = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""
_TIMEVAL = struct.Struct("@ll")
_READ_BYTES = 16384
_GONE = "the peer has closed the connection or is gone"


def listen(timeout_s: float) -> tuple[socket.socket, str]:
    """A listening socket, whose waits end after the timeout, and its address: 128 random bits."""
    listener = _new_socket(timeout_s)
    address = secrets.token_hex(16)
    try:
        listener.bind(_path(address))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener, address


def accept(listener: socket.socket) -> socket.socket:
    """The first connection of our user. Raises `TimeoutError` or `OSError`."""
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            raise TimeoutError("nobody has connected") from None
        if is_same_user(connection):
            return connection
        connection.close()


def dial(address: str, timeout_s: float) -> socket.socket:
    """A connection to whoever listens there, whose waits end after the timeout.

    Raises `OSError`.
    """
    connection = _new_socket(timeout_s)
    try:
        connection.connect(_path(address))
    except OSError:
        connection.close()
        raise
    return connection


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as our user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())


def _new_socket(timeout_s: float) -> socket.socket:
    """Its waits are the kernel's: unlike Python's own timeouts they are ended by `shutdown`."""
    new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _limit(new, socket.SO_RCVTIMEO, timeout_s)
    _limit(new, socket.SO_SNDTIMEO, timeout_s)
    return new


def _limit(limited: socket.socket, option: int, timeout_s: float) -> None:
    """0: none."""
    whole_s, part_s = divmod(timeout_s, 1.0)
    limited.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole_s), int(part_s * 1e6)))


def _path(address: str) -> bytes:
    return b"\0kvferry-" + address.encode()


class RecordStream:
    """Records over a connection: those that come have one size.

    Sending ends after the timeout. Receiving has none: the death of the peer ends it at once, and
    so does `shutdown` from another thread.
    """

    def __init__(self, connection: socket.socket, record_bytes: int, timeout_s: float) -> None:
        self._socket = connection
        self._record_bytes = record_bytes
        self._rest = b""
        _limit(connection, socket.SO_RCVTIMEO, 0.0)
        _limit(connection, socket.SO_SNDTIMEO, timeout_s)

    def send(self, records: bytes) -> None:
        """Send all of it. Raises `OSError`."""
        self._socket.sendall(records)

    def receive(self, *, block: bool) -> Sequence[bytes]:
        """Whole records that have come; waits for the first of them if `block`.

        Raises `ConnectionError` when the peer has closed or is gone.
        """
        while True:
            try:
                flags = 0 if block else socket.MSG_DONTWAIT
                came = self._socket.recv(_READ_BYTES, flags)
            except BlockingIOError:
                return ()
            except ConnectionResetError as error:
                # It has left before it read all that we sent.
                raise ConnectionError(_GONE) from error
            if not came:
                raise ConnectionError(_GONE)
            size = self._record_bytes
            raw = self._rest + came
            whole = len(raw) - len(raw) % size
            self._rest = raw[whole:]
            if whole:
                return [raw[start : start + size] for start in range(0, whole, size)]
