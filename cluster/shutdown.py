"""Ending something that has many parts: each part is ended, whatever the others do."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


def run_every_step(*steps: Callable[[], object]) -> None:
    """Run all steps in order; raise what the first failing one raised, after the last.

    Later failures are logged only: they often follow from the first.
    """
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - raised again below, once everything has ended
            if first is None:
                first = error
            else:
                _log.exception("a further step of the stop failed")
    if first is not None:
        raise first
