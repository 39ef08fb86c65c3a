"""Nothing of ours makes objects or code out of bytes that may have come over a network."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("kvferry", "mem_cache", "kv_transfer", "engine", "router"),
    *("prefill_worker", "decode_worker", "cluster"),
)
MODULES = {
    *("pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"),
    # Their connections and queues unpickle what they receive.
    *("multiprocessing", "xmlrpc"),
}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    # torch.load unpickles; yaml's other loaders make objects.
    *("torch.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
    *("numpy.load", "np.load"),
}
OF_OBJECTS = (
    *("send_object_list", "recv_object_list", "broadcast_object_list", "scatter_object_list"),
    *("gather_object", "all_gather_object"),
)
"""torch.distributed pickles what these move."""


def findings(source: str) -> list[str]:
    """What in a module could run bytes."""
    return [line for node in ast.walk(ast.parse(source)) for line in _of(node)]


def _of(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            roots = [each.name.split(".")[0] for each in names]
        case ast.ImportFrom(module=str(module)):
            roots = [module.split(".")[0]]
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            return [f"line {node.lineno}: {name}()"]
        case ast.Attribute(attr=attribute):
            is_bad = attribute in OF_OBJECTS or (
                attribute.split("_")[-1] in ("load", "all") and ast.unparse(node) in ATTRIBUTES
            )
            return [f"line {node.lineno}: {attribute}"] if is_bad else []
        case _:
            return []
    return [f"line {node.lineno}: {root}" for root in roots if root in MODULES]


def test_no_module_of_ours_does() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 200
    found = {
        str(file.relative_to(ROOT)): findings(file.read_text(encoding="utf-8")) for file in files
    }
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "from multiprocessing import connection",
        "import torch\ntorch.load(file)",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "eval(text)",
        "dist.broadcast_object_list(values)",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert findings(source)
