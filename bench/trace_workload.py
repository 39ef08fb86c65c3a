"""A published trace as a workload: its blocks become tokens, its lengths are scaled and cut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.traces import read_trace
from bench.workload import Planned, TokenSource, Workload
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from bench.plan import DatasetPlan
    from bench.traces import Trace
    from bench.workload import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class TracePrompts:
    """Equal blocks of the trace are equal tokens, so that what it shares is shared."""

    trace: Trace
    tokens: TokenSource
    block_tokens: int
    lengths: tuple[int, ...]
    """Of each prompt."""

    def prompt(self, index: int) -> Prompt:
        """[tokens] int32: the beginning of what its blocks hold, of its length."""
        parts, left = [], self.lengths[index]
        tree = self.trace.tree
        for node in tree.paths[index].tolist():
            count = min(left, int(tree.node_blocks[node]) * self.block_tokens)
            parts.append(self.tokens.tokens(count, node))
            left -= count
        # A length may say more than its blocks do; what is beyond them is shared with nobody.
        if left:
            parts.append(self.tokens.tokens(left, tree.node_blocks.size, index))
        return np.concatenate(parts)


def trace_workload(plan: DatasetPlan, tokens: TokenSource, seed: int) -> Workload:
    """Raises `InvalidInput` naming the flag at fault."""
    try:
        trace = read_trace(Path(plan.path), seed)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput("path", f"no trace can be read from {plan.path!r}: {error}") from error
    lengths = [
        fitted(plan, _scaled(request.prompt_tokens, plan), _scaled(request.answer_tokens, plan))
        for request in trace.requests
    ]
    requests, starts = _planned(trace, [answer for _, answer in lengths], plan.requests_max)
    block_tokens = max(1, round(trace.block_tokens * plan.scale_tokens))
    prompts = TracePrompts(trace, tokens, block_tokens, tuple(prompt for prompt, _ in lengths))
    return Workload(trace.name, requests, starts, prompts)


def fitted(plan: DatasetPlan, prompt: int, answer: int) -> tuple[int, int]:
    """(prompt, answer) tokens within the context: the answer keeps at most half of it, and a
    prompt loses its end, so that what it shares with others stays."""
    if not plan.context_max or prompt + answer <= plan.context_max:
        return prompt, answer
    answer = min(answer, max(1, plan.context_max // 2))
    return min(prompt, plan.context_max - answer), answer


def _scaled(count: int, plan: DatasetPlan) -> int:
    return max(1, round(count * plan.scale_tokens))


def _planned(
    trace: Trace, answers: list[int], count_max: int
) -> tuple[tuple[Planned, ...], tuple[int, ...]]:
    """The first requests of the trace, and which of them begin chains."""
    count = min(count_max, len(trace.requests))
    chain = {start: number for number, start in enumerate(trace.starts)}
    for number in range(count):
        for follower in trace.requests[number].followers:
            chain[follower] = chain[number]
    kept = trace.requests[:count]
    times = [request.at_s for request in kept if request.at_s is not None]
    first_s = min(times, default=0.0)
    requests = tuple(
        Planned(
            chain=chain[number],
            session=request.session,
            answer_tokens=answers[number],
            at_s=None if request.at_s is None else request.at_s - first_s,
            think_s=request.think_s,
            followers=tuple(other for other in request.followers if other < count),
        )
        for number, request in enumerate(kept)
    )
    return requests, tuple(start for start in trace.starts if start < count)
