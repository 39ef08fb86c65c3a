"""What became of each request, as the columns of a run record."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from simulator.attempt import SimRequest

_NONE = float("nan")
_FLOATS = ("scheduled_s", "first_token_s", "end_s")
_COUNTS = ("index", "session", "prompt_tokens", "answer_tokens", "attempts")
_UNSURE = ("cached_tokens", "moved_tokens")
"""Counts that may be missing."""
_NAMES = ("prefill_worker", "decode_worker", "outcome", "error")


class RunColumns:
    """Some ten numbers of each request, 100 bytes: of a million requests nothing else is kept."""

    def __init__(self) -> None:
        self._numbers = {name: array("d") for name in (*_FLOATS, *_COUNTS, *_UNSURE)}
        self._names = {name: array("i") for name in _NAMES}
        self._texts: dict[str | None, int] = {None: 0}

    def __len__(self) -> int:
        """Requests that have ended."""
        return len(self._numbers["index"])

    def add(self, request: SimRequest) -> None:
        """It has ended."""
        asked, done = request.asked, request.outcome == "done"
        values = {
            "scheduled_s": asked.at_s,
            "first_token_s": request.first_token_s,
            "end_s": request.end_s,
            "index": asked.index,
            "session": asked.session,
            "prompt_tokens": asked.prompt_tokens,
            "answer_tokens": asked.answer_tokens if done else request.known - asked.prompt_tokens,
            "attempts": request.attempts,
            "cached_tokens": request.cached_tokens,
            "moved_tokens": request.moved_tokens,
        }
        for name, value in values.items():
            self._numbers[name].append(_NONE if value is None else value)
        texts = (request.prefill_worker, request.decode_worker, request.outcome, request.error)
        for name, text in zip(_NAMES, texts, strict=True):
            self._names[name].append(self._texts.setdefault(text, len(self._texts)))

    def column(self, name: str) -> NDArray[np.float64]:
        """A column of numbers in order of `index`; NaN where there is none."""
        order = np.argsort(np.frombuffer(self._numbers["index"], dtype=np.float64))
        return np.frombuffer(self._numbers[name], dtype=np.float64)[order]

    def texts(self, name: str) -> list[str | None]:
        """A column of texts in order of `index`."""
        order = np.argsort(np.frombuffer(self._numbers["index"], dtype=np.float64))
        by_number = list(self._texts)
        numbers = np.frombuffer(self._names[name], dtype=np.int32)[order]
        return [by_number[number] for number in numbers.tolist()]

    def record(self, kv_bytes_per_token: int) -> dict[str, list[Any]]:
        """The columns of a run record, an entry per request in each."""
        columns: dict[str, list[Any]] = {}
        for name in _FLOATS:
            columns[name] = _rounded(self.column(name), 6)
        columns["sent_s"] = columns["scheduled_s"]
        for name in _COUNTS:
            columns[name] = self.column(name).astype(int).tolist()
        for name in _UNSURE:
            columns[name] = [None if v is None else int(v) for v in _rounded(self.column(name), 0)]
        columns["moved_bytes"] = [
            None if tokens is None else tokens * kv_bytes_per_token
            for tokens in columns["moved_tokens"]
        ]
        for name in _NAMES:
            columns[name] = list(self.texts(name))
        columns["itl_mean_s"] = _rounded(self.itl_mean_s(), 6)
        # Tokens are not simulated one by one.
        columns["itl_p99_s"] = columns["itl_max_s"] = [None] * len(self)
        return columns

    def ttft_s(self) -> NDArray[np.float64]:
        """Of each request; NaN where no token came."""
        return self.column("first_token_s") - self.column("scheduled_s")

    def itl_mean_s(self) -> NDArray[np.float64]:
        """Of each request with two tokens or more that was done; else NaN."""
        gaps = self.column("answer_tokens") - 1.0
        done = np.array([outcome == "done" for outcome in self.texts("outcome")], dtype=np.bool_)
        gaps[(gaps < 1.0) | ~done] = np.nan
        return (self.column("end_s") - self.column("first_token_s")) / gaps


def _rounded(values: NDArray[np.float64], digits: int) -> list[float | None]:
    return [None if value != value else round(value, digits) for value in values.tolist()]
