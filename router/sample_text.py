"""Tokens of one sample to its text, up to a stop string. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.stop_strings import StopScan, StopStringScanner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.generation import OutputToken
    from kvferry.sampling import SamplingParams
    from router.detokenizer import Detokenizer


class SampleText:
    """What one sample has said so far.

    Attributes:
        tokens: how many tokens it has, up to its end.
        first_at, last_at: when the first and the last of them came, None before that.
        is_done: whether it has ended; nothing may be pushed afterwards.
    """

    def __init__(
        self, sampling: SamplingParams, detokenizer: Detokenizer, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.tokens = 0
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.is_done = False
        self._detokenizer = detokenizer
        self._has_stops = bool(sampling.stop)
        self._scanner = StopStringScanner(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._silent_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._silent_ids |= frozenset(eos_token_ids)

    @property
    def span_s(self) -> float:
        """From its first token to its last one."""
        if self.first_at is None or self.last_at is None:
            return 0.0
        return self.last_at - self.first_at

    def push(self, tokens: Sequence[OutputToken], now: float) -> tuple[int, StopScan]:
        """How many of the tokens belong to the answer, and what may be shown of it now.

        Fewer than all where a stop string ends it within `tokens`.
        """
        if tokens:
            self.first_at = now if self.first_at is None else self.first_at
            self.last_at = now
        ids = [token.token_id for token in tokens]
        if self._has_stops:
            return self._push_one_by_one(ids)
        self.tokens += len(ids)
        return len(ids), StopScan(self._text_of(ids))

    def flush(self) -> StopScan:
        """What was held back is shown at the end; it may still complete a stop string."""
        scan = self._scan(self._detokenizer.flush())
        if scan.stop is not None:
            return scan
        return StopScan(scan.text + self._scanner.flush())

    def _push_one_by_one(self, ids: list[int]) -> tuple[int, StopScan]:
        """Only so is it known which token completes a stop string."""
        text = ""
        for position, token_id in enumerate(ids):
            self.tokens += 1
            scan = self._scan(self._text_of([token_id]))
            text += scan.text
            if scan.stop is not None:
                return position + 1, StopScan(text, scan.stop)
        return len(ids), StopScan(text)

    def _text_of(self, ids: list[int]) -> str:
        """The token that ends an answer is told as an id but has no text."""
        if not self._silent_ids.isdisjoint(ids):
            ids = [token_id for token_id in ids if token_id not in self._silent_ids]
        return self._detokenizer.push(ids)

    def _scan(self, text: str) -> StopScan:
        if self.tokens <= self._min_tokens:
            return StopScan(text)
        return self._scanner.push(text)
