"""The kept answers are those that `transformers` gives today."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.greedy_answers import WRITE_ANEW, answer_tokens, stored_answers
from tests.support.reference import Reference, divergence

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.prompts import Prompt

SAMPLE = ("length-17", "length-65", "turn-0")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kept_answers_are_those_of_transformers(
    every: bool, model_directory: Path, prompts: list[Prompt]
) -> None:
    reference = Reference(model_directory)
    chosen = [prompt for prompt in prompts if every or prompt.name in SAMPLE]
    assert len(chosen) >= len(SAMPLE)
    for prompt in chosen:
        new_tokens = answer_tokens(prompt)
        kept = stored_answers([prompt], new_tokens)[prompt.name]
        found = divergence(prompt.name, kept.ids, reference.greedy(prompt.ids, new_tokens))
        assert found is None or found.is_tie, f"{found}; anew by: {WRITE_ANEW}"
