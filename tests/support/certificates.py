"""Certificates made for one test run."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Identity:
    """PEM files of a certificate and its key."""

    certificate: Path
    key: Path

    def certificate_bytes(self) -> bytes:
        return self.certificate.read_bytes()

    def key_bytes(self) -> bytes:
        return self.key.read_bytes()


class Authority:
    """Signs certificates."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        extension = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(self._name, self._name, self._key.public_key())
        certificate = builder.add_extension(extension, critical=True)
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))

    def identity(self, name: str) -> Identity:
        """A certificate for 127.0.0.1, for servers and clients alike."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName([address, x509.DNSName("localhost")])
        builder = _builder(subject, self._name, key.public_key())
        certificate = builder.add_extension(names, critical=False)
        made = Identity(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        made.certificate.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))
        made.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return made


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
