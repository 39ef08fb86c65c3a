"""The process of one worker: a `WorkerProcess` and the calls its supervisor makes.

A plain class; `ray_launcher` makes it an actor with a few threads, so that a pending
`wait_until_ended` does not keep health calls waiting.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from cluster.launcher import StartOutcome, StartRefused
from kvferry.addresses import LOOPBACK
from kvferry.config import config_from_mapping
from kvferry.errors import InvalidInput, KvferryError
from kvferry.membership import Role
from kvferry.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cluster.members import MemberInfo
    from kvferry.ids import WorkerId

_log = logging.getLogger(__name__)


class WorkerActor:
    """Hosts one worker. Each method returns plain data; none raises what is ours."""

    def __init__(
        self,
        config: Mapping[str, Any],
        worker_id: WorkerId,
        role: str,
        node_address: Callable[[], str] = lambda: LOOPBACK,
    ) -> None:
        """`node_address` is asked in this process: it tells of the node where that runs."""
        configure_logging(worker_id)
        # Imported here, because the supervisor imports this module and must not load torch.
        from cluster.worker_process import WorkerProcess

        self._worker = WorkerProcess(
            config_from_mapping(config), worker_id, Role(role), node_address()
        )
        self._stopped = threading.Event()
        self._starting = threading.Lock()
        self._outcome: StartOutcome | None = None

    def start(self) -> StartOutcome:
        """Load the model and serve. Whoever asks again, another supervisor say, is told the same.

        Its threads are daemons of their own, so the caller may be gone meanwhile.
        """
        with self._starting:
            if self._outcome is None:
                self._outcome = self._start()
            return self._outcome

    def describe(self) -> MemberInfo | None:
        """What `start` told; None: it has not ended yet, or it refused."""
        outcome = self._outcome
        return None if isinstance(outcome, StartRefused) else outcome

    def _start(self) -> StartOutcome:
        try:
            return self._worker.start()
        except KvferryError as error:
            _log.error("cannot start", extra={"reason": str(error)})
            return StartRefused(str(error), for_good=isinstance(error, InvalidInput))

    def wait_until_ended(self, timeout_s: float) -> bool:
        """True after `stop`, False after `timeout_s`: the thread of a caller that is gone must be
        free again one day. A caller of a process that dies gets Ray's error instead."""
        return self._stopped.wait(timeout_s)

    def is_alive(self) -> bool:
        """Whether the engine makes progress."""
        return self._worker.is_alive()

    def stop(self) -> None:
        """End what runs and release `wait_until_ended`."""
        try:
            self._worker.stop()
        finally:
            self._stopped.set()
