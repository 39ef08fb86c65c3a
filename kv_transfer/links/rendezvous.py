"""The store through which the two ends of a link find one another, mirrored over the session.

`torch.distributed` groups meet in a key-value store. Its usual TCP server listens on every
interface; this one has no server: each side's entries are sent to the other as messages.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch.distributed import Store  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta


class RendezvousStore(Store):
    """A two-party store. `set` publishes to the peer; `put` takes what the peer published.

    Blocking calls end after `timeout_s` or when the store is closed, with `RuntimeError`.
    """

    def __init__(self, publish: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._publish = publish
        self._timeout_s = timeout_s
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed: str | None = None

    def put(self, key: str, value: bytes) -> None:
        """An entry of the peer."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Wake everyone who waits, with an error."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()

    # --- the calls torch makes, on the link's thread ---

    def set(self, key: str, value: str | bytes) -> None:
        """Store an entry and mirror it to the peer."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, data)
        self._publish(key, data)

    def get(self, key: str) -> bytes:
        """The entry, waiting for it if need be."""
        self.wait([key])
        with self._changed:
            return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._closed is not None or self._has(keys), limit_s)
            if self._closed is not None:
                raise RuntimeError(f"rendezvous closed: {self._closed}")
            if not self._has(keys):
                raise RuntimeError(f"rendezvous: no {list(keys)} from the peer in {limit_s:g} s")

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._entries for key in keys)
