"""Conversations of several turns over shared system prompts: what a prefix index lives on.

Every workload file defines `requests()`, which yields the prompts in order, each a list of token
ids. The same prompts come out of every run.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS = 2_000
SYSTEM_PROMPTS = 20
TURNS_MAX = 5
"""A conversation is over after so many."""
NEXT_TURN_SHARE = 0.7
"""Of the requests; the others begin a conversation."""
VOCABULARY = 50_000


def requests() -> Iterator[list[int]]:
    """Prompts of about 1,800 tokens on average, four fifths of which were seen before."""
    rng = random.Random(20)
    systems = [_text(rng, 400, 1_600) for _ in range(SYSTEM_PROMPTS)]
    open_turns: list[tuple[list[int], int]] = []
    for _ in range(REQUESTS):
        if open_turns and rng.uniform(0, 1) < NEXT_TURN_SHARE:
            prompt, turns = open_turns.pop(rng.randrange(len(open_turns)))
            prompt = prompt + _text(rng, 50, 700)
        else:
            prompt, turns = rng.choice(systems) + _text(rng, 20, 500), 0
        if turns + 1 < TURNS_MAX:
            open_turns.append((prompt, turns + 1))
        yield prompt


def _text(rng: random.Random, shortest: int, longest: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(shortest, longest))]
