"""Why a request went where it went, as lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from router.route_explanation import Candidate, Explanation

_PARTS = ("queue", "prefill", "copies", "handoff", "decode")
_NAMES = f"{'computes':>14}{'held':>8}{'decodes':>14}{'held':>8}"


def explanation_lines(at_s: float, explanation: Explanation) -> Iterator[str]:
    """Two tables: by who computes the prompt, and by who decodes."""
    unit = "ms" if explanation.is_time else "the policy's own measure"
    tokens = explanation.prompt_tokens
    yield f"at {at_s:.3f} s, {tokens} tokens; parts in ms, cost in {unit}; chosen is the first line"
    yield from _table(explanation.computing)
    if explanation.decoding:
        yield "who decodes, by the time after the prompt"
        yield from _table(explanation.decoding)


def _table(candidates: Sequence[Candidate]) -> Iterator[str]:
    yield _NAMES + "".join(f"{name:>10}" for name in (*_PARTS, "cost"))
    for each in candidates:
        names = f"{each.computing:>14}{each.held_tokens:>8}"
        names += f"{each.decode:>14}{each.decode_held_tokens:>8}"
        parts = (each.queue_ms, each.prefill_ms, each.copies_ms, each.handoff_ms, each.decode_ms)
        yield names + "".join(
            f"{'-' if part is None else f'{part:.1f}':>10}" for part in (*parts, each.cost)
        )
