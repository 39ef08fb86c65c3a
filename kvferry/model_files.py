"""Reads the JSON files of a model directory, for the engine and for the router alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError


def expand_home(path: str, setting: str) -> Path:
    """A path that may begin with `~` or `~user`. Raises `ConfigError` naming the setting where
    there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(setting, f"{path!r}: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises `ConfigError` naming `model.path`."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("model.path", f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("model.path", f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("model.path", f"{file} must contain a JSON object")
    return values
