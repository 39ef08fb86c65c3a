"""API keys: who may call, read from a file with one `tenant: key` per line.

A tenant may have several lines, so that a new key works beside an old one while callers change.
Keys are kept as digests only, compared in constant time, and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError, Unauthenticated
from kvferry.limits import (
    API_KEY_CHARACTERS_MAX,
    API_KEY_CHARACTERS_MIN,
    API_KEYS_MAX,
    TENANT_CHARACTERS_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SETTING = "router.security.api_keys"
AUTHORIZATION_HEADER = "authorization"
API_KEY_HEADER = "x-api-key"
_SCHEME = "bearer "


class ApiKeys:
    """The keys of one version of the file."""

    def __init__(self, tenants: Mapping[bytes, str]) -> None:
        """`tenants` by the digests of their keys."""
        self._tenants = tuple(tenants.items())

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """Whose key the call shows, as `authorization: Bearer KEY` or `x-api-key: KEY`.

        Names of headers are in lower case or found regardless of it. Raises `Unauthenticated`.
        """
        key = _shown_key(headers)
        if key is None:
            problem = f"show an API key as `{AUTHORIZATION_HEADER}: Bearer KEY`"
            raise Unauthenticated(problem)
        digest = _digest_of(key)
        found = ""
        # All of them, so that the time tells nothing of where or how far one matched.
        for known, tenant in self._tenants:
            if hmac.compare_digest(digest, known):
                found = tenant
        if not found:
            raise Unauthenticated("the API key is not known")
        return found


def read_api_keys(file: Path) -> ApiKeys:
    """Raises `ConfigError` naming the setting, and the line but nothing of what it says."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(SETTING, f"cannot read {file}: {_reason(error)}") from error
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        tenant, key = _entry(text, f"{file}, line {number}")
        digest = _digest_of(key)
        if tenants.setdefault(digest, tenant) != tenant:
            raise ConfigError(SETTING, f"{file}, line {number}: another tenant has the same key")
    if not tenants:
        raise ConfigError(SETTING, f"{file} has no keys, so that nobody could call")
    if len(tenants) > API_KEYS_MAX:
        raise ConfigError(SETTING, f"{file} has {len(tenants)} keys; at most {API_KEYS_MAX}")
    return ApiKeys(tenants)


def _entry(text: str, where: str) -> tuple[str, str]:
    tenant, colon, key = (part.strip() for part in text.partition(":"))
    if not colon or not tenant or not key:
        raise ConfigError(SETTING, f"{where}: must be `tenant: key`")
    if len(tenant) > TENANT_CHARACTERS_MAX:
        raise ConfigError(
            SETTING, f"{where}: the tenant's name has more than {TENANT_CHARACTERS_MAX} characters"
        )
    if not API_KEY_CHARACTERS_MIN <= len(key) <= API_KEY_CHARACTERS_MAX:
        bounds = f"{API_KEY_CHARACTERS_MIN} to {API_KEY_CHARACTERS_MAX}"
        raise ConfigError(SETTING, f"{where}: the key has {len(key)} characters; must be {bounds}")
    if not (key.isascii() and key.isprintable()) or " " in key:
        # Anything else could not be sent in a header.
        raise ConfigError(SETTING, f"{where}: the key must be printable ASCII without spaces")
    return tenant, key


def _shown_key(headers: Mapping[str, str]) -> str | None:
    shown = headers.get(AUTHORIZATION_HEADER, "")
    if shown[: len(_SCHEME)].lower() == _SCHEME:
        return shown[len(_SCHEME) :].strip()
    return headers.get(API_KEY_HEADER)


def _digest_of(key: str) -> bytes:
    # Keys are long and random, unlike passwords: a plain hash cannot be undone by trying.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _reason(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "is not UTF-8"
