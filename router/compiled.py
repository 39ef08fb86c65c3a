"""Loops that run as machine code: what a request does for every block, or for every worker.

A request looks at 250 blocks and 64 workers. As array operations that is a hundred calls of a
microsecond each, most of it overhead; a compiled loop is one call. Compiled when the module is
imported, never while a request waits, and cached on disk beside the source; Numba's cache does not
notice changes in other modules than the loop's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import numba

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(signature: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """For arguments of just these types, as Numba writes them."""
    decorate = numba.njit(signature, cache=True, error_model="numpy")
    return cast("Callable[[Callable[_P, _R]], Callable[_P, _R]]", decorate)


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """For use by compiled functions of the same module, into which it disappears."""
    return cast("Callable[_P, _R]", numba.njit(forceinline=True, error_model="numpy")(function))
