"""One request while it is answered, as its client sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.record import Outcome
    from bench.workload import Prompt
    from kvferry.clock import Clock


class Refusal(Exception):
    """The server said no before it answered anything; `code` is its word for it."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Failure(Exception):
    """The answer broke off, or nobody was there; `code` is the server's or the client's word."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class Usage:
    """What the server tells at the end; None: it does not."""

    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    cached_tokens: int | None = None
    moved_bytes: int | None = None
    moved_tokens: int | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    attempts: int | None = None


@dataclass(slots=True)
class Answer:
    """Times are of the client's clock."""

    clock: Clock
    index: int
    session: int
    scheduled_at: float
    sent_at: float | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None
    error: str | None = None
    usage: Usage = field(default_factory=Usage)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(when, how many tokens) of each message that brought some."""

    def sends(self) -> None:
        """The request leaves now."""
        self.sent_at = self.clock.now()

    def brings(self, tokens: int) -> None:
        """A message with so many tokens is here."""
        self.arrivals.append((self.clock.now(), tokens))

    def ends(self, outcome: Outcome, error: str | None = None) -> None:
        """Once."""
        assert self.outcome is None, f"request {self.index} ends twice"
        self.ended_at, self.outcome, self.error = self.clock.now(), outcome, error

    @property
    def tokens(self) -> int:
        """Of the answer: as the server counts, or as they came."""
        counted = sum(tokens for _, tokens in self.arrivals)
        told = self.usage.answer_tokens
        return counted if told is None else told

    def columns(self, start: float) -> Mapping[str, Any]:
        """Of `bench.record.Requests`; None for what is not known."""
        assert self.outcome is not None, f"request {self.index} has not ended"

        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - start

        usage = self.usage
        mean_s, p99_s, max_s = self._gaps_s()
        return {
            "index": self.index,
            "session": self.session,
            "scheduled_s": since(self.scheduled_at),
            "sent_s": since(self.sent_at),
            "first_token_s": since(self.arrivals[0][0] if self.arrivals else None),
            "end_s": since(self.ended_at),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "answer_tokens": self.tokens,
            "moved_bytes": usage.moved_bytes,
            "moved_tokens": usage.moved_tokens,
            "prefill_worker": usage.prefill_worker or None,
            "decode_worker": usage.decode_worker or None,
            "outcome": self.outcome.value,
            "error": self.error,
            "attempts": usage.attempts,
            "itl_mean_s": mean_s,
            "itl_p99_s": p99_s,
            "itl_max_s": max_s,
        }

    def _gaps_s(self) -> tuple[float | None, float | None, float | None]:
        """Mean, p99 and maximum. Tokens of one message have gaps of 0 but the first."""
        if self.tokens < 2 or len(self.arrivals) < 1:
            return None, None, None
        times = np.array([moment for moment, _ in self.arrivals])
        together = max(0, self.tokens - times.size)
        gaps = np.concatenate([np.diff(times), np.zeros(together)])
        mean_s = float(times[-1] - times[0]) / (self.tokens - 1)
        if not gaps.size or not math.isfinite(mean_s):
            return None, None, None
        return mean_s, float(np.quantile(gaps, 0.99)), float(gaps.max())


class Endpoint(Protocol):
    """A server, by one of its doors. One for all requests of a client."""

    async def ask(self, answer: Answer, prompt: Prompt, answer_tokens: int) -> None:
        """Send it (`answer.sends`), tell what comes (`brings`, `usage`), return at a whole end.

        Raises `Refusal` and `Failure`. Cancelled: the server is told to stop.
        """
        ...

    async def close(self) -> None:
        """Nothing is asked any more."""
        ...
