"""What admission counted, for status and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.request import ServiceClass
    from router.tenants import RefusalReason


@dataclass(frozen=True, slots=True)
class ClassSnapshot:
    """One class of service. Counts are since the router's start."""

    waiting: int
    """Now, those whose prompts are being tokenized among them."""
    running: int
    """Now."""
    granted: int
    refused: Mapping[RefusalReason, int]
    """Of every reason."""
    wait_s_total: float
    """Of all granted ones, from their known prompt to their places."""
    wait_s_max: float


@dataclass(frozen=True, slots=True)
class AdmissionSnapshot:
    """All classes at one moment."""

    classes: Mapping[ServiceClass, ClassSnapshot]
    places: int
    """Sequences that may run now."""
    places_taken: int
    tenants: int
    """Remembered."""
    hold_s: float | None
    """How long a sequence holds its place; None before the first has ended."""
