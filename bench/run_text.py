"""A summary as lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.record import RunRecord

_LATENCIES = (
    ("TTFT", "ttft_s"),
    ("ITL mean", "itl_mean_s"),
    ("ITL max", "itl_max_s"),
    ("E2E", "e2e_s"),
    ("sent late", "late_s"),
)


def run_lines(record: RunRecord) -> Iterator[str]:
    """What happened, then latencies, then what to beware of."""
    summary = record.summary
    counts = dict(summary["requests"])
    whole = counts.pop("all")
    ends = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    yield f"{whole} requests in {record.about.duration_s:.1f} s: {ends or 'none'}"
    yield from _rates(summary)
    yield f"{'ms':12}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}{'max':>10}"
    for title, name in _LATENCIES:
        yield f"{title:12}" + "".join(
            f"{_ms(summary[name][column]):>10}" for column in ("p50", "p90", "p95", "p99", "max")
        )
    if record.about.interrupted:
        yield "interrupted: this is a part of the run"
    yield from (f"warning: {text}" for text in record.about.warnings)


def _rates(summary: Any) -> Iterator[str]:
    rates = summary["throughput"]
    if rates["requests_per_s"] is not None:
        yield (
            f"{rates['requests_per_s']:.2f} answers/s, "
            f"{rates['prompt_tokens_per_s']:,.0f} prompt and "
            f"{rates['answer_tokens_per_s']:,.0f} answer tokens/s"
        )
    if summary["hit_rate"] is not None:
        yield f"{summary['hit_rate']:.1%} of prompt tokens were cached"
    if summary["moved_bytes"] is not None:
        yield (
            f"{summary['moved_tokens']:,.0f} tokens moved between workers, "
            f"{summary['moved_bytes']:,.0f} bytes"
        )
    goodput = summary["goodput"]
    if goodput is not None and goodput["requests_per_s"] is not None:
        yield (
            f"goodput {goodput['requests_per_s']:.2f} answers/s; {goodput['share']:.1%} within "
            "both targets"
        )


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{1000 * value_s:.1f}"
