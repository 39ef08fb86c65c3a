"""A small record of a run, for tests of what reads records."""

from __future__ import annotations

from typing import Any

from bench.record import About, RunKind

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
