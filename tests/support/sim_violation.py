"""What a simulated run that breaks a property raises."""

from __future__ import annotations


class Violation(AssertionError):
    """A property does not hold."""


def require(holds: bool, text: str) -> None:
    """Raise `Violation` unless it holds."""
    if not holds:
        raise Violation(text)
