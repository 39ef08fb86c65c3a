"""Who may look: the operator, and nobody from another site's page.

Prompts and ids of all tenants can be seen here, hence it takes what `kvferry.rpc.v1.Admin` takes.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from kvferry.errors import Forbidden
from kvferry.router_config import ADMIN_TENANT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.api.security import Security

_OWN_SITES = ("same-origin", "none")
"""Of `Sec-Fetch-Site`: asked by the console's own page, or by no page at all."""


class ConsoleAccess:
    """Decides for each call of the console's API."""

    def __init__(self, security: Security | None, host: str) -> None:
        """`host`: the address that the router binds."""
        self._security = security
        self._only_local = _is_loopback(host)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises `Unauthenticated` or `Forbidden`. Names in `headers` are found in any case."""
        if headers.get("Sec-Fetch-Site", "none") not in _OWN_SITES:
            raise Forbidden("the console answers its own page only, not those of other sites")
        security = self._security
        if security is not None and security.asks_for_keys:
            if security.tenant_of(headers) != ADMIN_TENANT:
                raise Forbidden(f"the console needs a key of the tenant `{ADMIN_TENANT}`")
        elif self._only_local and not _is_local_name(headers.get("Host", "")):
            # A name of somebody else that leads here: its page would count as ours.
            raise Forbidden(
                "host: this router is reached as localhost only; configure "
                "`router.security.api_keys` to reach the console by another name"
            )


def _is_local_name(host: str) -> bool:
    """Whether a `Host` header names this machine to itself; ports are of no interest."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    return name.lower() == "localhost" or _is_loopback(name.strip("[]"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
