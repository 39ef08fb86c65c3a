"""Real prompts of chosen lengths, for comparing answers token by token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "gsm8k.json"

LENGTHS = (
    *(1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 79, 100),
    *(127, 128, 129, 191, 255, 256, 257, 400, 511, 512, 513, 1000, 3000),
)
"""1, and one around every page border of page sizes 16 and 64, up to 3,000 tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to send, and a name for the report of a failure."""

    name: str
    ids: tuple[int, ...]


def real_prompts(tokenizer: Tokenizer) -> list[Prompt]:
    """43 prompts: 27 lengths, 10 with a shared prefix, 6 follow-up turns."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    questions: list[str] = data["questions"]
    text = data["preamble"] + "\n\n".join(questions)
    long = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(long) >= max(LENGTHS) + len(LENGTHS), f"only {len(long)} tokens of text"
    # Each length starts elsewhere, so that these prompts do not hit one another's prefixes.
    prompts = [
        Prompt(f"length-{length}", tuple(long[offset : offset + length]))
        for offset, length in enumerate(LENGTHS)
    ]
    shared = tokenizer.encode(data["preamble"], add_special_tokens=False).ids[:300]
    for number, question in enumerate(questions[:10]):
        ids = tokenizer.encode(question, add_special_tokens=False).ids
        prompts.append(Prompt(f"shared-{number}", (*shared, *ids)))
    turn = tuple(tokenizer.encode(questions[10], add_special_tokens=False).ids)
    for number, question in enumerate(questions[11:17]):
        turn = (*turn, *tokenizer.encode("\n" + question, add_special_tokens=False).ids)
        prompts.append(Prompt(f"turn-{number}", turn))
    return prompts
