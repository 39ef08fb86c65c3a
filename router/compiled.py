"""Loops that run as machine code: what a request does for every block, or for every worker.

A request looks at 250 blocks and 64 workers. As array operations that is a hundred calls of a
microsecond each, most of it overhead; a compiled loop is one call. Compiled when the module is
imported, never while a request waits, and cached on disk beside the source by their content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import numba

from kvferry.code_digest import name_by_content

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(signature: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """For arguments of just these types, as Numba writes them."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name_by_content(cast("FunctionType", function), signature)
        code = numba.njit(signature, cache=True, error_model="numpy")(function)
        return cast("Callable[_P, _R]", code)

    return decorate


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """For use by compiled functions, into which it disappears."""
    code = numba.njit(forceinline=True, error_model="numpy")(function)
    return cast("Callable[_P, _R]", code)
