"""On what and with what a run was made, for its record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_VERSIONS_OF = ("kvferry", "grpcio", "aiohttp", "numpy", "ray", "torch")


def machine() -> dict[str, Any]:
    """Of the client's machine; a field that it does not tell is null."""
    return {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": _gpus(),
        "os": platform.platform(),
        "load_average": list(os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Of what is installed here."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None


def _gpus() -> list[str]:
    """As the driver lists them; empty without one."""
    files = sorted(_NVIDIA.glob("*/information"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
