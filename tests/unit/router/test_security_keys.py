"""The file of API keys, and what a call must show."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from kvferry.errors import ConfigError, Unauthenticated
from router.api.security_keys import ApiKeys, read_api_keys

if TYPE_CHECKING:
    from pathlib import Path

BLUE = "key-of-the-blue-0001"
RED = "key-of-the-red-00001"


def read(directory: Path, text: str) -> ApiKeys:
    file = directory / "keys"
    file.write_text(text)
    return read_api_keys(file)


def test_a_tenant_is_found_by_either_header(tmp_path: Path) -> None:
    keys = read(tmp_path, f"# ours\n\nblue: {BLUE}\n  red:{RED}  \n")
    assert keys.tenant_of({"authorization": f"Bearer {BLUE}"}) == "blue"
    assert keys.tenant_of({"authorization": f"bearer  {RED}"}) == "red"
    assert keys.tenant_of({"x-api-key": RED}) == "red"


def test_a_tenant_may_have_several_keys(tmp_path: Path) -> None:
    keys = read(tmp_path, f"blue: {BLUE}\nblue: {RED}\nblue: {RED}\n")
    assert {keys.tenant_of({"x-api-key": key}) for key in (BLUE, RED)} == {"blue"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": BLUE},
        {"authorization": f"Basic {BLUE}"},
        {"authorization": "Bearer "},
        {"x-api-key": ""},
        {"x-api-key": BLUE[:-1]},
        {"x-api-key": BLUE + "1"},
        {"x-api-key": "ключ\udcff"},
    ],
)
def test_anything_else_is_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    keys = read(tmp_path, f"blue: {BLUE}\n")
    with pytest.raises(Unauthenticated) as caught:
        keys.tenant_of(headers)
    assert BLUE[:-1] not in str(caught.value)


def test_keys_are_compared_all_and_in_constant_time(tmp_path: Path) -> None:
    keys = read(tmp_path, f"blue: {BLUE}\nred: {RED}\n")
    with patch("router.api.security_keys.hmac.compare_digest", wraps=hmac.compare_digest) as seen:
        keys.tenant_of({"x-api-key": BLUE})
        assert seen.call_count == 2
        with pytest.raises(Unauthenticated):
            keys.tenant_of({"x-api-key": "unknown"})
        assert seen.call_count == 4
    compared = [argument for call in seen.call_args_list for argument in call.args]
    assert all(isinstance(each, bytes) and len(each) == 32 for each in compared)


def test_no_key_is_kept(tmp_path: Path) -> None:
    keys = read(tmp_path, f"blue: {BLUE}\n")
    assert BLUE not in repr(vars(keys))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no keys"),
        ("# nobody\n", "has no keys"),
        (f"blue: {BLUE}\nred {RED}\n", "line 2: must be `tenant: key`"),
        (f": {BLUE}\n", "line 1: must be"),
        ("blue:\n", "line 1: must be"),
        ("blue: tooshort\n", "line 1: the key has 8 characters; must be 16 to 512"),
        (f"blue: {513 * 'k'}\n", "line 1: the key has 513 characters"),
        ("blue: a key with some spaces\n", "printable ASCII without spaces"),
        (f"blue: {16 * 'é'}\n", "printable ASCII without spaces"),
        (f"blue: {BLUE}\nred: {BLUE}\n", "line 2: another tenant has the same key"),
        ("".join(f"blue: {number:016}\n" for number in range(1025)), "1025 keys; at most 1024"),
    ],
)
def test_a_malformed_file_is_refused_without_telling_keys(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert caught.value.field == "router.security.api_keys"
    assert problem in str(caught.value)
    assert BLUE not in str(caught.value)
    assert RED not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    with pytest.raises(ConfigError, match=f"api_keys: cannot read {missing}: No such file"):
        read_api_keys(missing)
    missing.write_bytes(b"blue: \xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_api_keys(missing)
