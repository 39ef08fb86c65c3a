"""Waiting for something to become true, with a bound."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvferry.clock import MonotonicClock

if TYPE_CHECKING:
    from collections.abc import Callable

HANG_GUARD_S = 60.0
"""Long enough for a busy machine: no verdict depends on how fast one is."""


def wait_until(
    what: str,
    happened: Callable[[], bool],
    within_s: float = HANG_GUARD_S,
    *,
    state: Callable[[], object] = lambda: "",
) -> None:
    """Poll until `happened()`; fail with `what` and `state()` after `within_s`."""
    clock = MonotonicClock()
    deadline = clock.now() + within_s
    while not happened():
        assert clock.now() < deadline, f"not within {within_s} s: {what} {state()}"
        time.sleep(0.005)
