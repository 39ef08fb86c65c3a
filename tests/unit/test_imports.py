"""What an import drags along, seen in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

_REPORT = """
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
print(",".join(sorted({module.partition(".")[0] for module in sys.modules})))
"""


def loaded_by(*modules: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _REPORT, ",".join(modules)],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(done.stdout.strip().split(","))


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (("kv_transfer.protocol.source", "kv_transfer.protocol.sink"), {"torch", "grpc", "ray"}),
        (("mem_cache.radix_cache", "mem_cache.slot_allocator"), {"torch", "grpc", "ray"}),
        (("router.router", "router.api.grpc_server"), {"torch", "ray", "transformers"}),
        (("cluster.cluster_state", "cluster.supervisor"), {"torch", "grpc", "ray"}),
        (("cluster.cli", "cluster.console"), {"torch", "ray", "transformers"}),
        (("cluster.worker_process",), {"ray", "transformers"}),
    ],
)
def test_what_decides_loads_nothing_heavy(modules, forbidden):
    assert loaded_by(*modules) & forbidden == set()


def test_the_check_would_see_a_module_that_is_loaded():
    assert "json" in loaded_by("kvferry.telemetry")
