"""Names for machine code on disk, by all that it was compiled from.

Numba keeps the code of a function in files named after it. Which of them are of its present source
an index says, that is written before they are: another process that reads it meanwhile, or any
later one if the writer was killed between, runs the code of a former source. Nor does it notice
that a function or a constant changed which the source only refers to. So a function gets a name of
which no other code was ever stored.
"""

from __future__ import annotations

from hashlib import blake2b
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numba.core.dispatcher import Dispatcher

if TYPE_CHECKING:
    from collections.abc import Iterator


def name_by_content(function: FunctionType, *settings: object) -> None:
    """Have the name of a function that is about to be compiled tell its code, the functions and
    constants of its module that it refers to, in turn, and the settings."""
    digest = blake2b(repr(settings).encode(), digest_size=8)
    for part in _parts_of(function.__code__, function.__globals__):
        digest.update(part)
    function.__qualname__ += f"_{digest.hexdigest()}"


def _parts_of(code: CodeType, names: dict[str, Any]) -> Iterator[bytes]:
    yield code.co_code
    yield repr((code.co_names, code.co_varnames)).encode()
    values = [*code.co_consts, *(names[name] for name in code.co_names if name in names)]
    for value in values:
        if isinstance(value, CodeType):
            yield from _parts_of(value, names)
        elif isinstance(value, Dispatcher):
            called = value.py_func
            yield from _parts_of(called.__code__, called.__globals__)
        elif isinstance(value, np.ndarray):
            yield repr((value.dtype, value.shape)).encode()
            yield value.tobytes()
        elif not callable(value) and not isinstance(value, ModuleType):
            yield repr(value).encode()
