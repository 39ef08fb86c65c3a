"""Steps of answers alone, counted."""

from __future__ import annotations

from engine.step_counts import StepCounts


def test_steps_with_prompts_say_nothing_of_answers() -> None:
    counts = StepCounts()
    counts.observe(prompt_tokens=0, sequences=3, seconds=0.01)
    counts.observe(prompt_tokens=128, sequences=3, seconds=0.5)
    counts.observe(prompt_tokens=128, sequences=0, seconds=0.5)
    counts.observe(prompt_tokens=0, sequences=5, seconds=0.02)
    assert counts.counters == {
        "decode_steps": 2,
        "decode_step_sequences": 8,
        "decode_step_us": 30_000,
    }
