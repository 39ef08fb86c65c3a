"""What each setting means, for the help of the command line.

A setting is explained in one place, the text below its field, in `kvferry.config` or the file of
its group. Python does not keep such texts, so they are read from the source.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import typing
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvferry.config import ClusterConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@functools.cache
def setting_texts() -> Mapping[str, str]:
    """Dotted name -> the text below the field, in one line. Every setting has one."""
    return MappingProxyType(dict(_texts(ClusterConfig, "")))


def _texts(kind: Any, prefix: str) -> Iterator[tuple[str, str]]:
    texts = _field_texts(_classes(kind.__module__)[kind.__name__])
    for name, value_kind in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(value_kind):
            yield from _texts(value_kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", texts[name]


@functools.cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    """Each module is parsed once: commands of clients wait for this, too."""
    lines = ast.parse(inspect.getsource(sys.modules[module])).body
    return {line.name: line for line in lines if isinstance(line, ast.ClassDef)}


def _field_texts(node: ast.ClassDef) -> dict[str, str]:
    texts: dict[str, str] = {}
    field = None
    for line in node.body:
        match line:
            case ast.AnnAssign(target=ast.Name(id=name)):
                field = name
            case ast.Expr(value=ast.Constant(value=str() as text)) if field is not None:
                texts[field] = " ".join(text.split())
    return texts
