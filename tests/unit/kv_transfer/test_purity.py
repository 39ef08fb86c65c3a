"""The protocol loads nothing that could do I/O."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import importlib, pkgutil, sys
import kv_transfer.protocol as package
for module in pkgutil.iter_modules(package.__path__):
    importlib.import_module(f"kv_transfer.protocol.{module.name}")
print(sorted({"torch", "grpc", "ray", "asyncio", "socket", "threading"} & set(sys.modules)))
"""


def test_a_fresh_interpreter_loads_no_io():
    run = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.strip().strip("[]").replace("'", "").split(", ")) - {""}
    # Python itself may load threading; the rest would be ours.
    assert loaded <= {"threading"}
