"""What the configuration says of security, and what becomes of a file of keys that changes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cluster.client_security import ClientSecurity
from kvferry.config import load_config
from kvferry.errors import ConfigError, InvalidInput, Unauthenticated
from kvferry.router_config import SecurityConfig
from router.api.security import Security, account_of
from tests.support.certificates import Authority
from tests.support.router_bench import eventually

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "the-old-key-00000001", "the-new-key-00000001"


def knows(security: Security, key: str) -> bool:
    try:
        return security.tenant_of({"x-api-key": key}) == "blue"
    except Unauthenticated:
        return False


def test_keys_can_be_changed_while_serving(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"blue: {OLD}\n")

    async def main() -> None:
        security = Security(SecurityConfig(api_keys=str(file)), reload_interval_s=0.01)
        security.start()
        file.write_text(f"blue: {OLD}\nblue: {NEW}\n")
        await eventually(lambda: knows(security, NEW))
        assert knows(security, OLD)
        # Replaced, as a mounted secret is.
        other = tmp_path / "other"
        other.write_text(f"blue: {NEW}\n")
        other.rename(file)
        await eventually(lambda: not knows(security, OLD))
        assert knows(security, NEW)
        await security.stop()

    asyncio.run(main())


@pytest.mark.parametrize("broken", ["blue\n", "", None])
def test_a_broken_file_changes_nothing(
    tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"blue: {OLD}\n")

    async def main() -> None:
        security = Security(SecurityConfig(api_keys=str(file)), reload_interval_s=0.01)
        security.start()
        if broken is None:
            file.unlink()
        else:
            file.write_text(broken)
        await eventually(lambda: "stay as they were" in caplog.text)
        assert knows(security, OLD)
        file.write_text(f"blue: {NEW}\n")
        await eventually(lambda: knows(security, NEW))
        await security.stop()

    asyncio.run(main())
    assert OLD not in caplog.text
    assert NEW not in caplog.text


def test_without_files_nobody_is_asked() -> None:
    security = Security(SecurityConfig())
    assert not security.asks_for_keys
    assert security.tls is None


def test_whose_account_a_call_goes_on() -> None:
    assert account_of("", "") == ""
    assert account_of("", "named") == "named"
    assert account_of("", "", "named") == "named"
    assert account_of("", "named", "named") == "named"
    assert account_of("blue", "") == "blue"
    assert account_of("blue", "blue", "blue") == "blue"
    for named, field in ((("red",), "x-kvferry-tenant"), (("", "red"), "tenant")):
        with pytest.raises(InvalidInput, match="is 'red'; this caller is 'blue'") as caught:
            account_of("blue", *named)
        assert caught.value.field == field
    with pytest.raises(InvalidInput, match="tenant: is 'b', and 'a' in x-kvferry-tenant"):
        account_of("", "a", "b")


def test_no_secret_is_shown_by_what_holds_it(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ca").identity("server")
    keys = tmp_path / "keys"
    keys.write_text(f"blue: {OLD}\n")
    security = Security(SecurityConfig(str(ours.certificate), str(ours.key), api_keys=str(keys)))
    client = ClientSecurity(api_key=OLD)
    shown = f"{vars(security)} {security.tls!r} {client!r}"
    assert "CERTIFICATE" in shown
    assert "PRIVATE KEY" not in shown
    assert OLD not in shown


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tls_certificate": "c.pem"}, "tls_key"),
        ({"tls_key": "c.key"}, "tls_key"),
        ({"tls_client_ca": "ca.pem"}, "tls_client_ca"),
    ],
)
def test_half_of_a_protection_is_refused(given: dict[str, str], field: str) -> None:
    overrides = {f"router.security.{name}": value for name, value in given.items()}
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, overrides)
    assert caught.value.field == f"router.security.{field}"


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ca").identity("server")
    other = Authority(tmp_path, "other-ca").identity("other")
    junk = tmp_path / "junk.pem"
    junk.write_text("nothing\n")
    good = SecurityConfig(tls_certificate=str(ours.certificate), tls_key=str(ours.key))
    assert Security(good).tls is not None
    missing = str(tmp_path / "none")
    cases = (
        ("tls_certificate", SecurityConfig(tls_certificate=missing, tls_key=str(ours.key))),
        ("tls_key", SecurityConfig(tls_certificate=str(ours.certificate), tls_key=missing)),
        ("tls_certificate", SecurityConfig(tls_certificate=str(junk), tls_key=str(ours.key))),
        (
            "tls_certificate",
            SecurityConfig(tls_certificate=str(ours.certificate), tls_key=str(other.key)),
        ),
        (
            "tls_client_ca",
            SecurityConfig(str(ours.certificate), str(ours.key), tls_client_ca=str(junk)),
        ),
        (
            "tls_client_ca",
            SecurityConfig(str(ours.certificate), str(ours.key), tls_client_ca=missing),
        ),
    )
    for field, config in cases:
        with pytest.raises(ConfigError) as caught:
            Security(config)
        assert caught.value.field == f"router.security.{field}", config


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"port": "50051"}, "port"),
        ({"port": "50052"}, "port"),
        ({"port": "65536"}, "port"),
        ({"host": ""}, "host"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "admin"}, "tenant"),
        ({"tenant": 129 * "t"}, "tenant"),
    ],
)
def test_a_port_of_the_gateway_that_cannot_be_is_refused(given: dict[str, str], field: str) -> None:
    overrides = {f"router.smg.{name}": value for name, value in given.items()}
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, overrides)
    assert caught.value.field == f"router.smg.{field}"
