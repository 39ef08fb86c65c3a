"""Numbers as people read them."""

from __future__ import annotations

import math

NOTHING = "–"  # noqa: RUF001 - an en dash is what tables have for nothing
_NO_BREAK = "\u00a0"


def seconds(value: float | None) -> str:
    """12 ms, 1.25 s, 340 s; microseconds below a millisecond."""
    if value is None or math.isnan(value):
        return NOTHING
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{digits(value * 1e6)}{_NO_BREAK}µs"
    if abs(value) < 1.0:
        return f"{digits(value * 1e3)}{_NO_BREAK}ms"
    return f"{digits(value)}{_NO_BREAK}s"


def count(value: float | None) -> str:
    """950, 12.3 k, 4.1 M."""
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T"))


def size(value: float | None) -> str:
    """512 B, 3.2 KiB, 1.5 GiB."""
    return _scaled(value, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))


def share(value: float | None) -> str:
    """12.5 %."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{digits(100.0 * value)}{_NO_BREAK}%"


def plain(value: float | None) -> str:
    """Three digits, no unit."""
    return NOTHING if value is None or math.isnan(value) else digits(value)


def digits(value: float) -> str:
    """Three that count, without zeros behind the point and without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scaled(value: float | None, base: float, units: tuple[str, ...]) -> str:
    if value is None or math.isnan(value):
        return NOTHING
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value /= base
        power += 1
    return f"{digits(value)}{_NO_BREAK}{units[power]}".rstrip(_NO_BREAK)
