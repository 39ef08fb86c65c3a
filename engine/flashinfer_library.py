"""FlashInfer, loaded when a worker's model is on a CUDA device, and not before."""

from __future__ import annotations

import importlib
from typing import Any

from kvferry.errors import ConfigError


def load_flashinfer() -> Any:
    """The module. Raises `ConfigError` where it is not installed or does not load."""
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        # A build for another CUDA or torch fails in any of these ways.
        problem = f"is cuda; that needs the package flashinfer-python, which says: {error}"
        raise ConfigError("model.device", problem) from error
