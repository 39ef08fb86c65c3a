"""Workers that are to die in a simulation, as they are written on a command line."""

from __future__ import annotations

import math

from kvferry.errors import InvalidInput
from kvferry.ids import WorkerId
from simulator.settings import WorkerDeath


def death_of(text: str) -> WorkerDeath:
    """Of "decode-3@60" or, if it comes back five seconds later, "decode-3@60+5". Raises
    `InvalidInput`."""
    name, _, times = text.rpartition("@")
    at, plus, back = times.partition("+")
    try:
        at_s, back_s = float(at), float(back) if plus else None
    except ValueError:
        raise _refused(text) from None
    if not name or any(not (math.isfinite(each) and each >= 0.0) for each in (at_s, back_s or 0.0)):
        raise _refused(text)
    return WorkerDeath(WorkerId(name), at_s, back_s)


def _refused(text: str) -> InvalidInput:
    return InvalidInput("death", f"is {text!r}; must be WORKER@SECONDS or WORKER@SECONDS+SECONDS")
