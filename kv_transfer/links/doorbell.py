"""What wakes a thread that waits for a socket: a descriptor that any thread may ring."""

from __future__ import annotations

import os
import threading


class Doorbell:
    """Ringing it makes `fileno` readable until it is answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        """From any thread; without effect once closed."""
        with self._lock:
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)

    def answer(self) -> None:
        """Make it silent until it rings again. It has rung."""
        os.eventfd_read(self.fileno())

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            assert self._fd is not None, "closed twice"
            os.close(self._fd)
            self._fd = None

    def fileno(self) -> int:
        """The descriptor, for `poll`."""
        assert self._fd is not None, "the doorbell is closed"
        return self._fd
