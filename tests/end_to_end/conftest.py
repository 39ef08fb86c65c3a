"""The real model and its reference answers, made once per run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from engine.model_directory import resolve_model
from kvferry.config import BUNDLED_MODEL
from tests.support.greedy_answers import ANSWER_TOKENS, stored_answers
from tests.support.prompts import Prompt, real_prompts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.reference import ReferenceAnswer


@pytest.fixture(scope="session")
def model_directory() -> Path:
    return resolve_model(BUNDLED_MODEL)


@pytest.fixture(scope="session")
def prompts(model_directory: Path) -> list[Prompt]:
    return real_prompts(Tokenizer.from_file(str(model_directory / "tokenizer.json")))


@pytest.fixture(scope="session")
def reference_answers(prompts: list[Prompt]) -> dict[str, ReferenceAnswer]:
    return stored_answers(prompts, ANSWER_TOKENS)
