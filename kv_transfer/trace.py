"""The trace of a worker's handoffs: a line in a file for each change of state, for diagnosis."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kv_transfer.protocol.key import HandoffKey
    from kvferry.clock import Clock
    from kvferry.ids import WorkerId

_LOG = logging.getLogger(__name__)


class HandoffTrace:
    """Appends `<seconds> <side> <request id>#<attempt> <state>` for each change.

    Seconds are of the machine's monotonic clock, so that lines of all workers of one machine can
    be sorted together. A line is one write to a file opened for appending: a reader never sees
    half of one, and what a killed process wrote is there. Called on the engine thread.
    """

    def __init__(self, trace_file: str, worker_id: WorkerId, clock: Clock) -> None:
        """Writes to `trace_file` with a point and the worker's id behind it.

        Raises `ConfigError` if that file cannot be opened.
        """
        self.path = f"{trace_file}.{worker_id}"
        self._clock = clock
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            self._file: int | None = os.open(self.path, flags, 0o644)
        except OSError as error:
            problem = f"cannot write {self.path}: {error.strerror}"
            raise ConfigError("handoff.trace_file", problem) from error

    def __call__(self, side: str, key: HandoffKey, state: str) -> None:
        """`side` is "source" or "sink"; `state` the value of the state that was entered."""
        if self._file is None:
            return
        line = f"{self._clock.now():.6f} {side} {key.request_id}#{key.attempt} {state}\n"
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            # Diagnosis must not end what it watches.
            _LOG.warning("trace ends", extra={"path": self.path, "reason": str(error)})
            self.close()

    def close(self) -> None:
        """Write no more; may be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
