"""How the next token of a request is chosen, and when the request is done."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvferry.errors import InvalidInput
from kvferry.limits import (
    LOGIT_BIAS_ENTRIES_MAX,
    LOGPROBS_MAX,
    SAMPLES_MAX,
    STOP_STRING_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_SEED_STEP = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: odd, so that no two of 2**64 samples have the same seed."""

_REPETITION_PENALTY_MIN = 0.009999999776482582
"""0.01 as the wire has it, in 24 bits."""


class ConstraintKind(Enum):
    """In which notation the language of an answer is given. Values are the wire's names."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """The language that an answer must be a text of."""

    kind: ConstraintKind
    text: str


_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request. Defaults leave the model's distribution as it is."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    seed: int = 0
    """Randomness is a function of (seed, position), so that a resumed request goes on alike."""
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    """Applied where text exists: at the router."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives reported beside each chosen token; None reports nothing."""
    n: int = 1
    """Samples: independent answers to one prompt, each bounded as a single one would be."""
    constraint: Constraint | None = None
    """None: any text."""

    def of_sample(self, index: int) -> SamplingParams:
        """The parameters under which a request of its own gives sample `index`, from 0.

        Its seed is (seed + index * 0x9E3779B97F4A7C15) mod 2**64: sample 0 is what n = 1 gives.
        """
        assert 0 <= index < self.n, f"sample {index} of {self.n}"
        return replace(self, n=1, seed=(self.seed + index * _SEED_STEP) % 2**64)

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidInput` naming the first field out of its range."""
        self._validate_numbers()
        self._validate_lists(vocab_size)

    def _validate_numbers(self) -> None:
        _require_range("sampling.temperature", self.temperature, 0.0, 100.0)
        _require_range("sampling.top_k", self.top_k, 0, 2**31 - 1)
        _require_range("sampling.top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidInput("sampling.top_p", "0 keeps no token; must be > 0")
        _require_range("sampling.min_p", self.min_p, 0.0, 1.0)
        # Bounded below as well: dividing logits by less would overflow them.
        least = _REPETITION_PENALTY_MIN
        _require_range("sampling.repetition_penalty", self.repetition_penalty, least, 100.0)
        _require_range("sampling.presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("sampling.frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_range("sampling.seed", self.seed, 0, 2**64 - 1)
        _require_range("sampling.max_tokens", self.max_tokens, 1, 2**31 - 1)
        _require_range("sampling.min_tokens", self.min_tokens, 0, self.max_tokens)
        _require_range("sampling.n", self.n, 1, SAMPLES_MAX)
        if self.logprobs is not None:
            _require_range("sampling.logprobs", self.logprobs, 0, LOGPROBS_MAX)

    def _validate_lists(self, vocab_size: int) -> None:
        _require_length("sampling.stop", len(self.stop), STOP_STRINGS_MAX)
        for position, text in enumerate(self.stop):
            if not text:
                raise InvalidInput(f"sampling.stop[{position}]", "must not be empty")
            _require_length(f"sampling.stop[{position}]", len(text), STOP_STRING_CHARACTERS_MAX)
        _require_length("sampling.stop_token_ids", len(self.stop_token_ids), STOP_TOKEN_IDS_MAX)
        for position, token in enumerate(self.stop_token_ids):
            _require_range(f"sampling.stop_token_ids[{position}]", token, 0, vocab_size - 1)
        _require_length("sampling.logit_bias", len(self.logit_bias), LOGIT_BIAS_ENTRIES_MAX)
        for token, bias in self.logit_bias.items():
            _require_range("sampling.logit_bias (token id)", token, 0, vocab_size - 1)
            _require_range(f"sampling.logit_bias[{token}]", bias, -100.0, 100.0)


def _require_range(name: str, value: float, low: float, high: float) -> None:
    if math.isnan(value) or not low <= value <= high:
        raise InvalidInput(name, f"is {value}; must be between {low} and {high}")


def _require_length(name: str, length: int, longest: int) -> None:
    if length > longest:
        raise InvalidInput(name, f"has {length} entries or characters; at most {longest}")
