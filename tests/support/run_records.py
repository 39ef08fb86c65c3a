"""A small record of a run, for tests of what reads records."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.record import About, Outcome, Requests, RunKind, RunRecord
from bench.summary import summarized

COLUMNS: dict[str, list[Any]] = {
    "index": [0, 1, 2],
    "session": [0, 1, 1],
    "scheduled_s": [0.0, 1.0, 2.0],
    "sent_s": [0.0, 1.5, 2.0],
    "first_token_s": [0.5, 2.5, None],
    "end_s": [2.5, 4.5, 2.25],
    "prompt_tokens": [100, 200, None],
    "cached_tokens": [0, 96, None],
    "answer_tokens": [11, 1, 0],
    "moved_bytes": [4096, 0, None],
    "moved_tokens": [100, 0, None],
    "prefill_worker": ["prefill-0", None, None],
    "decode_worker": ["decode-0", "decode-1", None],
    "outcome": ["done", "done", "refused"],
    "error": [None, None, "RESOURCE_EXHAUSTED"],
    "attempts": [1, 2, None],
    "itl_mean_s": [0.2, None, None],
    "itl_p99_s": [0.25, None, None],
    "itl_max_s": [0.3, None, None],
}
"""A complete answer, one of a single token that was sent late, and one refused."""


def an_about(**changes: Any) -> About:
    """Of a measured open loop of ten seconds."""
    fields: dict[str, Any] = {
        "name": "small",
        "kind": RunKind.MEASURED,
        "started": "2026-01-02T03:04:05+00:00",
        "duration_s": 10.0,
        "dataset": {"name": "random"},
        "load": {"mode": "open"},
        "endpoint": "grpc",
        "seed": 1,
    }
    return About(**(fields | changes))


def queued_run(
    *,
    seed: int,
    count: int = 600,
    slower: float = 1.0,
    refused: float = 0.0,
    **changes: Any,
) -> RunRecord:
    """Requests of `seed` at 4 per second at one worker, busy for half of its time.

    `slower` stretches what every step takes; of the same seed all runs send the same requests.
    """
    rng = np.random.default_rng(seed)
    began = np.cumsum(rng.exponential(0.25, count))
    prompt = np.round(rng.lognormal(6.5, 0.6, count))
    cached = prompt // 32 * 16
    answer = 2.0 + np.round(rng.exponential(30.0, count))
    spent = (prompt - cached) / 3500.0 * slower
    # Lindley: it begins once all before it are done; a running maximum of begins less work.
    work = np.cumsum(spent)
    first = np.maximum.accumulate(began - work + spent) + work if count else began
    itl = 0.03 * slower * rng.lognormal(0.0, 0.2, count)
    left_out = rng.random(count) < refused
    end = np.where(left_out, began, first + itl * (answer - 1.0))
    unknown = np.full(count, np.nan)
    columns: dict[str, Any] = {
        "index": np.arange(count),
        "session": np.arange(count) // 4,
        "scheduled_s": began,
        "sent_s": began,
        "first_token_s": np.where(left_out, np.nan, first),
        "end_s": end,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "answer_tokens": np.where(left_out, 0.0, answer),
        "moved_bytes": (prompt - cached) * 1024.0,
        "moved_tokens": prompt - cached,
        "prefill_worker": ("prefill-0",) * count,
        "decode_worker": tuple(f"decode-{place % 2}" for place in range(count)),
        "outcome": tuple(Outcome.REFUSED if out else Outcome.DONE for out in left_out),
        "error": tuple("RESOURCE_EXHAUSTED" if out else None for out in left_out),
        "attempts": np.ones(count),
        "itl_mean_s": np.where(left_out, np.nan, itl),
        "itl_p99_s": unknown,
        "itl_max_s": unknown,
    }
    duration_s = float(end.max()) if count else 1.0
    return summarized(an_about(**{"duration_s": duration_s, **changes}), Requests(**columns))
