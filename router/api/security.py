"""Who may call the front doors, and how connections are protected: TLS and API keys, for both.

A call of a tenant's key is on that tenant's account. The tenant `admin` is the operator: only its
keys may call `kvferry.rpc.v1.Admin`. Without a file of keys anybody may do anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError, InvalidInput
from router.api.security_keys import ApiKeys, read_api_keys
from router.api.security_tls import read_tls

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from kvferry.router_config import SecurityConfig
    from router.api.security_tls import Tls

_log = logging.getLogger(__name__)

TENANT_HEADER = "x-kvferry-tenant"
"""Names the tenant where no keys are needed; in gRPC it is metadata."""

_RELOAD_INTERVAL_S = 2.0
"""How often the file of keys is looked at: so long may a key work that was taken out of it."""


class Security:
    """What both front doors ask. Use between `start` and `stop`, within one event loop."""

    def __init__(
        self, config: SecurityConfig, reload_interval_s: float = _RELOAD_INTERVAL_S
    ) -> None:
        """Reads all files. Raises `ConfigError` naming the setting at fault."""
        self.tls: Tls | None = read_tls(config)
        self._file = Path(config.api_keys) if config.api_keys else None
        # Seen before it is read: what is written meanwhile is then read once more.
        self._seen = None if self._file is None else _version_of(self._file)
        self._keys: ApiKeys | None = None if self._file is None else read_api_keys(self._file)
        self._reload_interval_s = reload_interval_s
        self._watch: asyncio.Task[None] | None = None

    @property
    def asks_for_keys(self) -> bool:
        """Whether callers need a key."""
        return self._keys is not None

    def start(self) -> None:
        """Follow changes of the file of keys."""
        if self._file is not None:
            self._watch = asyncio.create_task(self._follow(self._file))

    async def stop(self) -> None:
        """No more of that."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """Whose key the call shows. Raises `Unauthenticated`. Only if it `asks_for_keys`."""
        assert self._keys is not None, "nobody needs a key here"
        return self._keys.tenant_of(headers)

    async def _follow(self, file: Path) -> None:
        while True:
            await asyncio.sleep(self._reload_interval_s)
            try:
                await self._read_if_changed(file)
            except ConfigError as error:
                _log.error("the API keys stay as they were", extra={"reason": str(error)})
            except Exception:  # noqa: BLE001 - outermost frame; a bug of ours must not end following
                _log.exception("the API keys stay as they were")

    async def _read_if_changed(self, file: Path) -> None:
        """Raises `ConfigError`. In a thread: the file may lie on another machine."""
        version = await asyncio.to_thread(_version_of, file)
        if version != self._seen:
            self._seen = version
            self._keys = await asyncio.to_thread(read_api_keys, file)
            _log.info("the API keys were read again")


def account_of(caller: str, header: str, field: str = "") -> str:
    """On whose account a call of the tenant `caller` goes ("": nobody has to say who it is).

    `header` is what it names in `TENANT_HEADER`, `field` what in the request. Raises `InvalidInput`
    for the name of somebody else, and for two names.
    """
    if header and field and header != field:
        raise InvalidInput("tenant", f"is {field!r}, and {header!r} in {TENANT_HEADER}")
    asked = header or field
    if caller and asked not in ("", caller):
        name = TENANT_HEADER if header else "tenant"
        raise InvalidInput(name, f"is {asked!r}; this caller is {caller!r}")
    return caller or asked


def _version_of(file: Path) -> tuple[int, int, int] | None:
    """Differs when the file was written or replaced; None while it cannot be looked at."""
    try:
        status: os.stat_result = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
