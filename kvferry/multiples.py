"""How large the multiples in a JSON schema are, taken together."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any


def common_multiple(schema: Any, most: int) -> int | None:
    """The least common multiple of every `multipleOf` in a schema, wherever it stands. Of a
    fraction the digits count, 0.25 as 25. None: it is above `most`."""
    found, nodes = 1, [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes.extend(node)
        if not isinstance(node, dict):
            continue
        nodes.extend(node.values())
        value = node.get("multipleOf")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found = math.lcm(found, _digits(value))
            if not 0 < found <= most:
                return None
    return found


def _digits(value: float) -> int:
    """The number without its sign and its point."""
    if isinstance(value, int):
        return abs(value)
    digits = Decimal(str(value)).normalize().as_tuple().digits
    return int("".join(map(str, digits)))
