"""Prompt tokens beside running answers: so many that the step keeps the limit of their gaps.

A step cannot be interrupted, so a chunk of a prompt is a pause of every answer in the step. The
chunk is as large as what steps cost here (`engine.step_cost`) lets it be. Where nothing decodes
nobody is kept waiting, and `scheduler.chunk_tokens` alone holds.

**Prompts progress.** Whatever the limit, a step may compute `PROMPT_TOKENS_MIN` tokens of the
prompt whose turn it is (`engine.prompt_order`), if `chunk_tokens` is no less: so a prompt of n
tokens has its turn for n / 16 steps at most, rounded up.

Drafts (`engine.speculation`) are added when this is decided, and are not foreseen: steps with them
may be longer than the limit by what the drafts cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.request import Stage
from engine.step_cost import StepCost, StepShape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.request import Request

PROMPT_TOKENS_MIN = 16
"""Cheap beside the weights that a step reads anyway."""


class Item(Protocol):
    """What is looked at of `engine.scheduler.StepItem`."""

    @property
    def request(self) -> Request:
        """Whose tokens these are."""
        ...

    @property
    def start(self) -> int:
        """The first of them."""
        ...

    @property
    def stop(self) -> int:
        """Behind the last of them."""
        ...

    @property
    def draft(self) -> tuple[int, ...]:
        """What is computed behind these."""
        ...


class ItlLimit:
    """The limit of one engine, and what its steps have cost."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._cost = StepCost()

    def prompt_tokens(
        self, decoding: Iterable[Request], prefilling: Iterable[Request], most: int
    ) -> int:
        """Tokens that a step may compute of prompts, from 1 to `most`, which is at least 1.

        As if all of them came behind the longest computed part of `prefilling`.
        """
        contexts = [request.num_tokens for request in decoding]
        if not contexts:
            return most
        shape = StepShape(len(contexts), sum(contexts))
        start = max((request.held_kv.committed_len for request in prefilling), default=0)
        tokens = self._cost.prompt_tokens(shape, start, self._limit_s, most)
        return max(tokens, min(PROMPT_TOKENS_MIN, most))

    def observe(self, items: Iterable[Item], seconds: float) -> None:
        """A step of `items`, still in the stages in which it was planned, took so long."""
        tokens = context = 0
        prompts: list[Item] = []
        for item in items:
            if item.request.stage is Stage.PREFILLING:
                prompts.append(item)
            else:
                tokens += item.stop - item.start + len(item.draft)
                context += item.stop
        shape = StepShape(tokens, context)
        for item in prompts:
            shape = shape.with_prompt(item.stop - item.start, item.start)
        self._cost.observe(shape, seconds)
