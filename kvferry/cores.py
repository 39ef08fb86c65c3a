"""Sets of processor cores, written as `0`, `2-5` or `0-3,8`."""

from __future__ import annotations

import re

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def cores_in(text: str) -> frozenset[int]:
    """The cores that `text` names; none for an empty text. Raises `ValueError`."""
    if not text:
        return frozenset()
    cores: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{part.strip()!r} is neither a core nor a range of cores")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} runs backwards")
        cores |= set(range(first, last + 1))
    return frozenset(cores)
