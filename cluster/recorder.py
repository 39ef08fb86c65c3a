"""Keeps the durable record of a cluster up to date."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvferry.errors import WorkerUnavailable
from kvferry.limits import RECORD_SAVE_TIMEOUT_S, RESTART_BACKOFF_MAX_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.cluster_record import ClusterRecord, RecordStore

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
"""After a save that failed; doubles with each further one."""


class Recorder:
    """Saves what there is to be known, one save at a time, and none without a change."""

    def __init__(self, store: RecordStore, take: Callable[[], ClusterRecord]) -> None:
        self._store = store
        self._take = take
        self._saved = ""
        self._saving = asyncio.Lock()
        self._changed = asyncio.Event()

    def touch(self) -> None:
        """Something may have changed; it is saved soon."""
        self._changed.set()

    async def save(self) -> None:
        """Returns when all that is known now is on record.

        Raises `WorkerUnavailable` if that is not sure in time; it is tried again all the same.
        """
        try:
            async with asyncio.timeout(RECORD_SAVE_TIMEOUT_S):
                await self._save()
        except (TimeoutError, WorkerUnavailable) as error:
            self.touch()
            problem = "is not on record yet, and would be forgotten with this supervisor"
            raise WorkerUnavailable(f"the order is carried out, but {problem}") from error

    async def run(self) -> None:
        """Save whatever changes. Returns never."""
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._save()
                pause_s = _FIRST_PAUSE_S
            except WorkerUnavailable as error:
                _log.warning("the record cannot be saved", extra={"reason": str(error)})
                self.touch()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RESTART_BACKOFF_MAX_S)

    async def _save(self) -> None:
        async with self._saving:
            text = self._take().to_json()
            if text != self._saved:
                await self._store.save(text)
                self._saved = text
