"""What a client shows to a router, and by what it knows the router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """Files are PEM. Without an authority the connection is in the clear."""

    tls_ca: Path | None = None
    """Who signed the router's certificate."""
    tls_certificate: Path | None = None
    """Of this client, for routers that ask for one."""
    tls_key: Path | None = None
    api_key: str = field(default="", repr=False)

    def open_channel(self, address: str, options: Sequence[tuple[str, Any]]) -> Any:
        """Connects when it is first used. Raises `InvalidInput` naming the flag at fault."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidInput(
                "tls-key", "goes with tls-certificate, and neither without the other"
            )
        if self.tls_ca is None:
            if self.tls_certificate is not None:
                raise InvalidInput("tls-certificate", "needs tls-ca")
            return grpc.insecure_channel(address, options)
        credentials = grpc.ssl_channel_credentials(
            _read("tls-ca", self.tls_ca),
            None if self.tls_key is None else _read("tls-key", self.tls_key),
            None
            if self.tls_certificate is None
            else _read("tls-certificate", self.tls_certificate),
        )
        return grpc.secure_channel(address, credentials, options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def _read(flag: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidInput(flag, f"cannot read {file}: {error.strerror}") from error
