"""What a run's figures mean, in one place: all that reports or compares runs takes them from here.

* TTFT: first token - scheduled time; in a closed loop - time of sending.
* ITL: of one answer, (last token - first token) / (tokens - 1); quantiles are over answers.
* E2E: end - scheduled time; in a closed loop - time of sending.
* Hit rate: cached prompt tokens / prompt tokens, of the requests that tell both.
* Goodput: answers that are complete and within both targets, per second of the run. An answer of
  one token has no gaps and meets the target of gaps.

Latencies are of complete answers only; how many are not is told beside them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.record import LoadMode, Outcome, RunRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.record import About, Floats, Requests, Targets

QUANTILES = (0.5, 0.9, 0.95, 0.99)


def summarized(about: About, requests: Requests) -> RunRecord:
    """A record with its summary."""
    return RunRecord(about, requests, summary_of(about, requests))


def quantiles(values: Floats) -> dict[str, float | None]:
    """Mean, maximum and p50 to p99 (linear between neighbours) of what is not NaN; None of none."""
    known = values[~np.isnan(values)]
    names = [f"p{round(100 * share)}" for share in QUANTILES]
    if not known.size:
        return dict.fromkeys((*names, "mean", "max"))
    found = dict(zip(names, np.quantile(known, QUANTILES).tolist(), strict=True))
    return {**found, "mean": float(known.mean()), "max": float(known.max())}


def hit_rate(requests: Requests) -> float | None:
    """Of all prompt tokens, the part that nobody computed; None where no answer tells."""
    known = ~np.isnan(requests.cached_tokens) & ~np.isnan(requests.prompt_tokens)
    prompt = float(requests.prompt_tokens[known].sum())
    return float(requests.cached_tokens[known].sum()) / prompt if prompt else None


def within_targets(requests: Requests, mode: LoadMode, targets: Targets) -> np.ndarray:
    """[requests] bool: complete, and within both targets."""
    ttft_s = requests.ttft_s(mode)
    gaps_s = np.nan_to_num(requests.itl_mean_s, nan=0.0)
    held: np.ndarray = requests.done & (ttft_s <= targets.ttft_s) & (gaps_s <= targets.itl_s)
    return held


def goodput(
    requests: Requests, mode: LoadMode, targets: Targets, duration_s: float
) -> dict[str, float | None]:
    """Answers within both targets per second, and which part they are of all requests."""
    held = int(within_targets(requests, mode, targets).sum())
    return {
        "requests_per_s": held / duration_s if duration_s > 0 else None,
        "share": held / len(requests) if len(requests) else None,
    }


def summary_of(about: About, requests: Requests) -> Mapping[str, Any]:
    """The figures of a run; see the module's text."""
    done, mode = requests.done, about.mode
    counts = {
        outcome.value: sum(entry is outcome for entry in requests.outcome) for outcome in Outcome
    }
    summary: dict[str, Any] = {
        "requests": {"all": len(requests), **counts},
        "duration_s": about.duration_s,
        "throughput": _throughput(requests, done, about.duration_s),
        "ttft_s": quantiles(requests.ttft_s(mode)[done]),
        "itl_mean_s": quantiles(requests.itl_mean_s[done]),
        "itl_max_s": quantiles(requests.itl_max_s[done]),
        "e2e_s": quantiles(requests.e2e_s(mode)[done]),
        "hit_rate": hit_rate(requests),
        "moved_bytes": _sum(requests.moved_bytes),
        "moved_tokens": _sum(requests.moved_tokens),
        "late_s": quantiles(requests.late_s),
        "goodput": None,
    }
    if about.targets is not None:
        summary["goodput"] = goodput(requests, mode, about.targets, about.duration_s)
    return summary


def with_targets(record: RunRecord, targets: Targets) -> RunRecord:
    """The same run judged by other targets."""
    return summarized(replace(record.about, targets=targets), record.requests)


def _throughput(requests: Requests, done: np.ndarray, duration_s: float) -> dict[str, float | None]:
    if duration_s <= 0:
        return dict.fromkeys(("requests_per_s", "prompt_tokens_per_s", "answer_tokens_per_s"))
    return {
        "requests_per_s": float(done.sum()) / duration_s,
        "prompt_tokens_per_s": float(np.nansum(requests.prompt_tokens[done])) / duration_s,
        "answer_tokens_per_s": float(np.nansum(requests.answer_tokens)) / duration_s,
    }


def _sum(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.sum()) if known.size else None
