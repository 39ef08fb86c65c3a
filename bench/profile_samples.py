"""What a profile measures, before anything is fitted to it. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PromptSample:
    """One prompt, computed alone or beside others."""

    tokens: int
    """Computed; those in the cache are not among them."""
    steps: int
    token_contexts: float
    """The sum, over the tokens computed, of the tokens before each."""
    computed_s: float
    """By the clock of the worker: from the first step to the first token."""
    before_s: float
    """From the arrival at the router until workers were chosen."""
    ttft_s: float
    """As the client saw it."""
    handoff_s: float
    """From the first token until all KV was there; 0 without a handoff."""
    moved_tokens: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class AnswerSample:
    """Steps of answers, by the counters of the workers that decode."""

    steps: int
    sequences: int
    """Over all steps."""
    context_tokens: float
    """Over all steps and sequences."""
    seconds: float


@dataclass(slots=True)
class Profile:
    """All that was measured."""

    prompts: list[PromptSample] = field(default_factory=list)
    answers: list[AnswerSample] = field(default_factory=list)
    prompts_beside: list[PromptSample] = field(default_factory=list)
    """While all workers computed."""
    answers_beside: list[AnswerSample] = field(default_factory=list)
    others: int = 0
    """Workers that computed beside each of these."""
    workers: dict[str, int] = field(default_factory=dict)
    """How many there are of each role."""
    link_bytes_per_s: float = 0.0
    """As the workers measured it; 0 if nothing was moved."""
