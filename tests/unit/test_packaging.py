"""The root folders are import packages, so their names must be ours alone."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = [
    pattern.removesuffix("*")
    for pattern in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
]

EXTRAS = ("gguf", "otel", "smg")
"""Those with which the product does more."""


def test_our_top_level_names_belong_to_this_distribution_alone():
    owners = importlib.metadata.packages_distributions()
    assert {name: set(owners[name]) for name in PACKAGES} == {
        name: {"kvferry"} for name in PACKAGES
    }


def test_every_packaged_folder_exists_and_has_types():
    for name in PACKAGES:
        assert (ROOT / name / "__init__.py").is_file(), name
        assert (ROOT / name / "py.typed").is_file(), name


def test_the_checkers_look_at_every_package():
    assert PYPROJECT["tool"]["mypy"]["packages"] == PACKAGES
    assert PYPROJECT["tool"]["importlinter"]["root_packages"] == PACKAGES


def test_no_script_bears_the_name_of_a_package():
    """A driver named router.py would shadow `router`: Ray puts its folder on sys.path."""
    scripts = {path.stem for path in ROOT.glob("*.py")}
    assert scripts & set(PACKAGES) == set()
    commands = set(PYPROJECT["project"]["scripts"])
    # `kvferry` is a file without an ending in a folder that holds no modules.
    assert commands & (set(PACKAGES) - {"kvferry"}) == set()


def test_proto_holds_no_python():
    """`proto` is proto-plus, which Ray's extras install; ours must not be importable."""
    assert list((ROOT / "proto").rglob("*.py*")) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_docstring_of_a_package_says_what_it_is_for_and_nothing_is_imported(package):
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree)
    assert docstring is not None
    assert len(docstring.split()) >= 10
    assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree))


def test_everything_the_product_imports_is_declared():
    """Each third-party module imported by the packages comes from a declared dependency."""
    owners = importlib.metadata.packages_distributions()
    project = PYPROJECT["project"]
    declared = {
        requirement.split(">")[0].split("=")[0].lower()
        for requirement in itertools.chain(
            project["dependencies"], *(project["optional-dependencies"][name] for name in EXTRAS)
        )
    }
    imported = {name for package in PACKAGES for name in _imports_of(ROOT / package)}
    # Several distributions share a name such as `google`: it is enough to declare one of them.
    found = {
        name: {owner.lower().replace("_", "-") for owner in owners[name]}
        for name in imported & set(owners)
    }
    undeclared = {name for name, of in found.items() if not of & (declared | {"kvferry"})}
    assert found
    assert undeclared == set()


def _imports_of(folder: Path) -> set[str]:
    names = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names.add(node.module.partition(".")[0])
    return names
