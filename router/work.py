"""What a request asks of the workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.sampling import SamplingParams

_ANSWER_TOKENS_EXPECTED = 128
"""Of one sample; answers are seldom as long as they may be. The truth is settled at the end."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is known of a request before it runs, in tokens."""

    prompt_tokens: int
    """To be computed: without what is cached."""
    answer_tokens: int = 0
    """Expected, of all samples."""
    sequences: int = 1
    """Samples."""
    kv_tokens: int = 0
    """By which a worker admits it: its prompt, and a part of its longest answers."""
    prompt_len: int = 0
    """With what is cached."""
    longest: int = 0
    """Prompt and answers at most."""

    @property
    def tokens(self) -> int:
        """By which shares are counted."""
        return self.prompt_tokens + self.answer_tokens


def work_of(
    sampling: SamplingParams, prompt_len: int, uncached: int, output_reserve: float
) -> Work:
    """`uncached`: tokens of the prompt that are to be computed."""
    longest_answers = sampling.n * sampling.max_tokens
    return Work(
        prompt_tokens=uncached,
        answer_tokens=sampling.n * min(sampling.max_tokens, _ANSWER_TOKENS_EXPECTED),
        sequences=sampling.n,
        # Cached pages are shared with others, so they are nobody's own.
        kv_tokens=uncached + round(output_reserve * longest_answers),
        prompt_len=prompt_len,
        longest=prompt_len + longest_answers,
    )
