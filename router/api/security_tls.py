"""TLS of both front doors, from the files that the configuration names."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.router_config import SecurityConfig

_PREFIX = "router.security."


@dataclass(frozen=True, slots=True)
class Tls:
    """A certificate that was read and goes with its key."""

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    """Clients must show a certificate signed by it; None: they need none."""
    context: ssl.SSLContext
    """The same for HTTP."""

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The same for gRPC."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)],
            root_certificates=self.client_ca,
            require_client_auth=self.client_ca is not None,
        )


def read_tls(config: SecurityConfig) -> Tls | None:
    """None without a certificate. Raises `ConfigError` naming the setting at fault."""
    if not config.tls_certificate:
        return None
    certificate = _read("tls_certificate", config.tls_certificate)
    key = _read("tls_key", config.tls_key)
    client_ca = _read("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None
    return Tls(certificate, key, client_ca, _context(config))


def _context(config: SecurityConfig) -> ssl.SSLContext:
    """gRPC does not say what is wrong with a file, so that this is also its check."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key under a passphrase would make OpenSSL ask at the terminal.
        context.load_cert_chain(config.tls_certificate, config.tls_key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        problem = (
            f"{config.tls_certificate} and {config.tls_key} are not a PEM certificate and its "
            f"key: {error}"
        )
        raise ConfigError(f"{_PREFIX}tls_certificate", problem) from error
    if config.tls_client_ca:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except ssl.SSLError as error:
            problem = f"{config.tls_client_ca} has no PEM certificate: {error}"
            raise ConfigError(f"{_PREFIX}tls_client_ca", problem) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_passphrase() -> str:
    raise ValueError("the key is protected by a passphrase")


def _read(setting: str, name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{_PREFIX}{setting}", f"cannot read {name}: {error.strerror}") from error
