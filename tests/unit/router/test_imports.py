"""What importing the router loads, seen in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

LISTED = "import sys; print(*(name for name in sys.modules if name in {'torch', 'ray'}))"
CORE = "router.prefix_index, router.load, router.policy, router.detokenizer, router.stop_strings"


def loaded(statement: str, listed: str = LISTED) -> str:
    result = subprocess.run(
        [sys.executable, "-c", f"{statement}; {listed}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return result.stdout.strip()


@pytest.mark.parametrize("module", ["router.router", "router.api.grpc_server"])
def test_the_router_loads_neither_torch_nor_ray(module: str) -> None:
    assert loaded(f"import {module}") == ""


def test_what_decides_loads_no_network() -> None:
    listed = "import sys; print(*(name for name in sys.modules if name in {'grpc', 'asyncio'}))"
    assert loaded(f"import {CORE}", listed) == ""
