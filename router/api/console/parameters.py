"""Parameters of the console's API. Every one has bounds; what is not known is refused."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from kvferry.errors import InvalidInput
from kvferry.limits import (
    CONSOLE_TREE_DEPTH_MAX,
    CONSOLE_TREE_NODES_MAX,
    CONSOLE_TREE_TOKENS_MAX,
    TREE_PATH_NODES_MAX,
)
from kvferry.tree_view import TreeQuery

if TYPE_CHECKING:
    from collections.abc import Mapping

_TREE_NODES_DEFAULT = 200
_TREE_DEPTH_DEFAULT = 32
_TREE_TOKENS_DEFAULT = 0
_NODE_ID_MAX = 2**63 - 1
_YES_NO = {"true": True, "false": False}


def check_names(given: Mapping[str, str], *known: str) -> None:
    """Raises `InvalidInput` for a parameter that is none of `known`."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidInput(name[:64], f"is no parameter of this call{hint}")


def whole_number(given: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    """Raises `InvalidInput` naming the parameter."""
    text = given.get(name)
    if text is None:
        return default
    problem = f"is {text[:32]!r}; must be a whole number from {low} to {high}"
    try:
        value = int(text) if text.isascii() and len(text) <= 20 else None
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise InvalidInput(name, problem)
    return value


def tree_query(given: Mapping[str, str]) -> TreeQuery:
    """Of `nodes`, `depth`, `tokens` and `path`, ids with points between them.

    Raises `InvalidInput` naming the parameter.
    """
    return TreeQuery(
        nodes_max=whole_number(given, "nodes", _TREE_NODES_DEFAULT, 1, CONSOLE_TREE_NODES_MAX),
        depth_max=whole_number(given, "depth", _TREE_DEPTH_DEFAULT, 1, CONSOLE_TREE_DEPTH_MAX),
        tokens_max=whole_number(given, "tokens", _TREE_TOKENS_DEFAULT, 0, CONSOLE_TREE_TOKENS_MAX),
        path=_path(given.get("path", "")),
    )


def yes_or_no(given: Mapping[str, str], name: str) -> bool:
    """False if it is not given. Raises `InvalidInput` naming the parameter."""
    text = given.get(name, "false")
    if text not in _YES_NO:
        raise InvalidInput(name, f"is {text[:32]!r}; must be true or false")
    return _YES_NO[text]


def _path(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    parts = text.split(".", TREE_PATH_NODES_MAX)
    if len(parts) > TREE_PATH_NODES_MAX:
        raise InvalidInput("path", f"has more than {TREE_PATH_NODES_MAX} nodes")
    if not all(part.isascii() and part.isdigit() and len(part) <= 19 for part in parts):
        raise InvalidInput("path", f"is {text[:32]!r}; must be ids of nodes with points between")
    ids = tuple(map(int, parts))
    if max(ids) > _NODE_ID_MAX:
        raise InvalidInput("path", f"is {text[:32]!r}; no node has such an id")
    return ids
