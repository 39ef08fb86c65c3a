"""Drafts of a test: right up to some place, because the answers are known beforehand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from engine.speculation import Drafts
from tests.support.digest_model import VOCAB, next_token
from tests.support.engine_bench import name_of

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from engine.request import Request
    from kvferry.ids import TokenIds

ALWAYS = math.inf
"""As the cost of a step: a draft is worth computing whatever the chance that it is right."""


class Oracle:
    """Proposes what an undisturbed run answered, by `name_of` a sample.

    `faults`: decides from where on a draft is wrong; None: none is.
    """

    def __init__(
        self, answers: Mapping[str, Sequence[int]], faults: random.Random | None = None
    ) -> None:
        self._answers = answers
        self._faults = faults

    def __call__(self, request: Request, most: int) -> TokenIds:
        at = len(request.output)
        draft = list(self._answers.get(name_of(request), ())[at : at + most])
        right = len(draft) if self._faults is None else self._faults.randint(0, len(draft))
        draft[right:] = [(token + 1) % VOCAB for token in draft[right:]]
        return np.asarray(draft, dtype=np.int32)


def knowing(
    answers: Mapping[str, Sequence[int]],
    faults: random.Random | None = None,
    max_draft: int = 4,
) -> Drafts:
    """Drafts by an `Oracle`, of full length in every step."""
    return Drafts(Oracle(answers, faults), max_draft, ALWAYS)


class Remembered:
    """Proposes what followed the same tokens in a text that was learnt, wrong from a random place
    on in some proposals. Proposes nothing before it has learnt something."""

    def __init__(self, faults: random.Random) -> None:
        self._after: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._faults = faults

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Of one sample."""
        tokens = (*prompt, *answer)
        for end in range(len(prompt), len(tokens)):
            self._after[tokens[:end]] = tokens[end:]

    def __call__(self, request: Request, most: int) -> TokenIds:
        draft = list(self._after.get(tuple(request.known.tolist()), ())[:most])
        if draft and self._faults.random() < 0.3:
            right = self._faults.randrange(len(draft))
            draft[right:] = [(token + 1) % VOCAB for token in draft[right:]]
        return np.asarray(draft, dtype=np.int32)


def foreseen(request: Request, most: int) -> TokenIds:
    """The greedy answer of the digest model for `most` tokens, wrong from a place on that depends
    on where the request stands."""
    tokens = request.known.tolist()
    # Not of its arrival, which counts on from one example of a test to the next.
    right = (request.prompt_len + request.sample + request.num_tokens) % (most + 1)
    for at in range(most):
        token = next_token(tokens)
        tokens.append(token if at < right else (token + 1) % VOCAB)
    return np.asarray(tokens[request.num_tokens :], dtype=np.int32)
