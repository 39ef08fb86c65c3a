"""The files of a LoRA adapter in peft's format, and what tells one adapter from another.

A name says nothing of what it named last week, or names on another host: adapters are known by a
digest of their files, wherever KV is shared or a worker is asked to compute with one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError
from kvferry.ids import AdapterId

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What was read at one moment: `identity` is that of just these bytes."""

    setting: str
    """The dotted name of the setting that names the directory."""
    config: bytes
    weights: bytes

    @property
    def identity(self) -> AdapterId:
        """Hexadecimal; equal for equal files."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        digest.update(f"{len(self.config)} ".encode())
        digest.update(self.config)
        digest.update(self.weights)
        return AdapterId(digest.hexdigest())


def adapter_directory(name: str, directory: str) -> Path:
    """Absolute. Raises `ConfigError` naming `model.adapters.NAME`."""
    try:
        return Path(directory).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"model.adapters.{name}", f"{directory!r}: {error}") from error


def read_adapter(name: str, directory: str) -> AdapterFiles:
    """Raises `ConfigError` naming `model.adapters.NAME`."""
    setting, folder = f"model.adapters.{name}", adapter_directory(name, directory)
    contents: list[bytes] = []
    for file in (folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        try:
            contents.append(file.read_bytes())
        except OSError as error:
            raise ConfigError(setting, f"cannot read {file}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(setting, f"{directory!r} is no path: {error}") from error
    return AdapterFiles(setting, *contents)


def adapter_identities(adapters: Mapping[str, str]) -> dict[str, AdapterId]:
    """By name; `adapters` are their directories. Raises `ConfigError` as `read_adapter` does."""
    return {name: read_adapter(name, folder).identity for name, folder in adapters.items()}
