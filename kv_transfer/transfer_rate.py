"""How fast payloads come in: what the router prices a handoff with."""

from __future__ import annotations

_KEPT = 0.8
"""Weight of the past at each new stretch: about the last five count."""


class TransferRate:
    """Running mean of bytes per second over the stretches in which a link was busy.

    Bytes and seconds are averaged apart, so that a short stretch, whose time says little, counts
    little.
    """

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, payload_bytes: int, seconds: float) -> None:
        """One stretch: from the first header on a link at rest until its last payload is used."""
        self._bytes = _KEPT * self._bytes + payload_bytes
        self._seconds = _KEPT * self._seconds + seconds

    @property
    def bytes_per_s(self) -> float:
        """0 before the first stretch."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0
