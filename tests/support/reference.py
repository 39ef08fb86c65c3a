"""Greedy answers of `transformers` in float32: what kvferry's must equal token for token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TIE = 1e-4
"""Two logits this close may swap places when a batch's shape changes the order of sums."""


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """Greedy continuation, and for each token by how much it beat the second best logit."""

    ids: tuple[int, ...]
    margins: tuple[float, ...]


class Reference:
    """The model as `transformers` runs it."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.eval()

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> ReferenceAnswer:
        """`new_tokens` tokens, end-of-text or not."""
        prompt_ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self._model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                max_new_tokens=new_tokens,
                min_new_tokens=None,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = torch.stack(out.logits)[:, 0].topk(2, dim=-1).values
        margins = (best[:, 0] - best[:, 1]).tolist()
        return ReferenceAnswer(tuple(out.sequences[0, len(prompt) :].tolist()), tuple(margins))


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer leaves the reference."""

    name: str
    position: int
    margin: float

    @property
    def is_tie(self) -> bool:
        """Whether the reference itself was undecided there."""
        return self.margin < TIE


def divergence(name: str, answer: Sequence[int], reference: ReferenceAnswer) -> Divergence | None:
    """The first position where `answer` differs; None when they are equal."""
    for position, expected in enumerate(reference.ids):
        if position >= len(answer):
            return Divergence(name, position, float("inf"))
        if answer[position] != expected:
            return Divergence(name, position, reference.margins[position])
    if len(answer) > len(reference.ids):
        return Divergence(name, len(reference.ids), float("inf"))
    return None
