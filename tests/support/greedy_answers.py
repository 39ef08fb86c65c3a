"""What `transformers` answers to the real prompts, kept in a file: asking it takes minutes.

Machines differ in the last bits of a logit, thus in answers only where two tokens tie; the file
says by how much each token won. `python -m tests.support.greedy_answers` writes it anew.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.support.reference import Reference, ReferenceAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.prompts import Prompt

FILE = Path(__file__).parents[1] / "data" / "greedy_answers.json"
WRITE_ANEW = "python -m tests.support.greedy_answers"
ANSWER_TOKENS = 8
SHORT_PROMPT_TOKENS = 129
SHORT_ANSWER_TOKENS = 24
"""Of prompts of at most `SHORT_PROMPT_TOKENS`: what follows their first tokens is tested, too."""


def answer_tokens(prompt: Prompt) -> int:
    """How many tokens of the answer to `prompt` are kept."""
    short = len(prompt.ids) <= SHORT_PROMPT_TOKENS
    return SHORT_ANSWER_TOKENS if short else ANSWER_TOKENS


def stored_answers(prompts: Sequence[Prompt], new_tokens: int) -> dict[str, ReferenceAnswer]:
    """`new_tokens` tokens of each answer, by the prompts' names.

    Fails for a prompt that is not the one that was asked.
    """
    entries = json.loads(FILE.read_text(encoding="utf-8"))
    for prompt in prompts:
        same = entries.get(prompt.name, {}).get("prompt") == _digest(prompt)
        assert same, f"{prompt.name} is another prompt now: {WRITE_ANEW}"
        assert new_tokens <= answer_tokens(prompt), prompt.name
    return {
        prompt.name: ReferenceAnswer(
            *(tuple(entries[prompt.name][part][:new_tokens]) for part in ("ids", "margins"))
        )
        for prompt in prompts
    }


def write_answers(reference: Reference, prompts: Sequence[Prompt]) -> None:
    """Ask `reference`, and keep what it says."""
    entries = {}
    for prompt in prompts:
        answer = reference.greedy(prompt.ids, answer_tokens(prompt))
        margins = [float(f"{margin:.4g}") for margin in answer.margins]
        entries[prompt.name] = {"prompt": _digest(prompt), "ids": answer.ids, "margins": margins}
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()
    )
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _digest(prompt: Prompt) -> str:
    return hashlib.sha256(np.array(prompt.ids, "<u4").tobytes()).hexdigest()[:16]


def _main() -> None:
    from tokenizers import Tokenizer

    from engine.model_directory import resolve_model
    from kvferry.config import BUNDLED_MODEL
    from tests.support.prompts import real_prompts

    directory = resolve_model(BUNDLED_MODEL)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    write_answers(Reference(directory), real_prompts(tokenizer))


if __name__ == "__main__":
    _main()
