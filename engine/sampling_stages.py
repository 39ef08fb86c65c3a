"""Compiles the stages of sampling while nobody waits, the first time a machine runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.adjusting import adjusting
from engine.drawing import drawing, weighing
from engine.ranking import picking, ranking, telling
from engine.sampling_item import item_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.native_math import Task
    from kvferry.errors import KvferryError


class SamplingStages:
    """A `LoopPart`: an idle turn compiles one stage, or loads it if it was compiled before.

    A start would be seconds longer with all of them. An answer that comes first, and needs one that
    is not there, has it compiled in its step.
    """

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        # Those of an answer that is drawn from all tokens come first.
        stages = (item_part, weighing, drawing, ranking, picking, adjusting, telling)
        self._missing: list[Callable[[], Task]] = list(stages)

    @property
    def missing(self) -> int:
        """Stages that were not looked at yet."""
        return len(self._missing)

    def handle(self, event: object) -> bool:
        """No event is meant for it."""
        return False

    def tick(self) -> None:
        """Compile one if nobody waits."""
        if self._missing and self._is_idle():
            self._missing.pop(0)()

    def next_deadline(self) -> float | None:
        """None: nobody waits for it, and `tick` is called often enough."""
        return None

    def flush(self) -> None:
        """Nothing to send."""

    def stop(self, error: KvferryError) -> None:
        """Nothing to end."""
