"""When a source came how far with a prompt, for its sink's router."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.attempt_marks import PromptMarks


@dataclass(slots=True, eq=False)
class PromptTimes:
    """Readings of the worker's clock; what has not come yet counts as coming now."""

    asked_at: float
    scheduled_at: float | None = None
    computed_at: float | None = None
    granted_at: float | None = None

    def completed(self, now: float) -> PromptMarks:
        """Everything is with the link."""
        return PromptMarks(
            scheduled_s=self._since_asked(self.scheduled_at, now),
            computed_s=self._since_asked(self.computed_at, now),
            granted_s=self._since_asked(self.granted_at, now),
            completed_s=now - self.asked_at,
        )

    def _since_asked(self, at: float | None, now: float) -> float:
        return (now if at is None else at) - self.asked_at
