"""What each setting means, for the help of the command line.

A setting is explained in one place, the text below its field, in `kvferry.config` or the file of
its group. Python does not keep such texts, so they are read from the source.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from typing import TYPE_CHECKING, Any

from kvferry.config import ClusterConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


def setting_texts() -> dict[str, str]:
    """Dotted name -> the text below the field, in one line. Every setting has one."""
    return dict(_texts(ClusterConfig, ""))


def _texts(kind: Any, prefix: str) -> Iterator[tuple[str, str]]:
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    texts = _field_texts(node)
    for name, value_kind in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(value_kind):
            yield from _texts(value_kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", texts[name]


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
