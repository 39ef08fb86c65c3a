"""The thread of one end of a lane: how it starts, is woken and ends, whatever the transport."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kv_transfer.links.interface import LinkClosed

if TYPE_CHECKING:
    from kv_transfer.links.interface import LinkChannel, ReceiverListener, SenderListener

_LOG = logging.getLogger(__name__)


class LaneThread(ABC):
    """Runs `_serve` until it raises, lets go of everything, and reports the end once."""

    def __init__(self, channel: LinkChannel, listener: SenderListener | ReceiverListener) -> None:
        self._channel = channel
        self._failed = listener.failed
        self._lock = threading.Lock()
        self._close_reason: str | None = None

    def start(self, name: str) -> None:
        """Begin. A daemon: a thread held by a dead peer must not keep the process."""
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self, reason: str) -> None:
        """See `LinkEnd.close`."""
        with self._lock:
            if self._close_reason is not None:
                return
            self._close_reason = reason
        # Through the store it is woken while it builds, by `_wake` later on.
        self._channel.store.close(reason)
        self._wake()

    def _check_open(self) -> None:
        """Raise `LinkClosed` if this side has closed the link."""
        if self._close_reason is not None:
            raise LinkClosed(self._close_reason)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  # outermost frame: ends the generation
            reason = f"{type(error).__name__}: {error}"
            if self._close_reason is None:
                _LOG.info("link ended", extra={"reason": reason})
        else:
            reason = "its thread returned"
        # Buffers and connection are let go of before the end is reported.
        self._drop()
        # What fails because this side has closed the link ended by that.
        self._failed(self._close_reason or reason)

    @abstractmethod
    def _serve(self) -> None:
        """Build, report that, and carry payloads; returns never."""

    @abstractmethod
    def _wake(self) -> None:
        """End the thread's wait for work or for an idle peer. From any thread, once."""

    @abstractmethod
    def _drop(self) -> None:
        """Let go of buffers and connection. On the thread, once, whatever exists by then."""
