"""What an engine's steps of answers alone took, for those who plan by it."""

from __future__ import annotations


class StepCounts:
    """Counted since the start. Steps with prompts in them say nothing of answers."""

    def __init__(self) -> None:
        self._steps = 0
        self._sequences = 0
        self._seconds = 0.0

    def observe(self, prompt_tokens: int, sequences: int, seconds: float) -> None:
        """A step that computed so many tokens of prompts, and one more of so many answers."""
        if prompt_tokens == 0 and sequences:
            self._steps += 1
            self._sequences += sequences
            self._seconds += seconds

    @property
    def counters(self) -> dict[str, int]:
        """For the worker's status; the time in microseconds."""
        return {
            "decode_steps": self._steps,
            "decode_step_sequences": self._sequences,
            "decode_step_us": round(1e6 * self._seconds),
        }
