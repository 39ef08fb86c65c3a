"""Requests to be simulated: a trace, as often and as fast as is asked for.

A trace that has fewer requests than are asked for is played several times at once, each time
shifted a little, and each time with prompts of its own: copies share nothing with each other. Times
are scaled to the rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench.traces import read_trace
from kvferry.errors import InvalidInput
from router.request import ServiceClass
from simulator.attempt import Asked
from simulator.page_ids import page_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bench.traces import Trace

_SHIFT_S = 60.0
"""Copies of a trace begin within so many of its seconds..."""
_JITTER_S = 3.0
"""...and each request within so many: times in traces are rounded to this."""
_NODE_SHIFT = 24
"""More blocks than any node of a trace has are 2 to this power."""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """A request as a trace has it."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: NDArray[np.uint64]
    """Names of the blocks of its prompt, the last one maybe not full; equal names, equal tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """The requests of a trace, in order of arrival."""

    name: str
    block_tokens: int
    patterns: Sequence[Pattern]

    @property
    def context_tokens(self) -> int:
        """Of the longest request, prompt and answer."""
        return max(each.prompt_tokens + each.answer_tokens for each in self.patterns)

    @property
    def rate(self) -> float:
        """Requests per second as recorded."""
        return len(self.patterns) / max(self._span_s, 1e-9)

    @property
    def _span_s(self) -> float:
        return self.patterns[-1].at_s - self.patterns[0].at_s

    def requests(self, count: int, rate: float, page_size: int, seed: int) -> Iterator[Asked]:
        """So many requests, `rate` of them per second in the mean. Raises `InvalidInput`."""
        if self.block_tokens % page_size:
            what = (
                f"{page_size} does not divide the blocks of the trace, {self.block_tokens} tokens"
            )
            raise InvalidInput("page_size", what)
        copies = -(-count // len(self.patterns))
        times, order = self._times(copies, seed)
        scale = count / rate / max(times.flat[order[count - 1]] - times.flat[order[0]], 1e-9)
        begin = times.flat[order[0]]
        for index, position in enumerate(order[:count].tolist()):
            number, copy = divmod(position, copies)
            at_s = float((times[number, copy] - begin) * scale)
            yield self._asked(index, at_s, number, copy, page_size)

    def _times(self, copies: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
        """When each pattern of each copy comes, in seconds of the trace, and their order."""
        rng = np.random.default_rng(seed)
        recorded = np.array([each.at_s for each in self.patterns])
        if copies == 1:
            return recorded[:, None], np.argsort(recorded, kind="stable")
        jitter = rng.random((recorded.size, copies)) * _JITTER_S
        times = recorded[:, None] + rng.random(copies) * _SHIFT_S + jitter
        return times, np.argsort(times, axis=None, kind="stable")

    def _asked(self, index: int, at_s: float, number: int, copy: int, page_size: int) -> Asked:
        pattern = self.patterns[number]
        full = pattern.prompt_tokens // page_size
        per_block = self.block_tokens // page_size
        ids = page_ids(pattern.blocks, per_block, copy)[: full + 1]
        if ids.size <= full:
            ids = np.append(ids, np.zeros(full + 1 - ids.size, dtype=np.int32))
        return Asked(
            index=index,
            at_s=at_s,
            prompt_tokens=pattern.prompt_tokens,
            answer_tokens=pattern.answer_tokens,
            ids=ids,
            service_class=ServiceClass.STANDARD,
        )


def read_workload(path: Path, seed: int) -> Workload:
    """A trace that has times, in any of the formats of `bench.traces`. `seed` draws what a trace
    of rates leaves open.

    Raises `InvalidInput` for a file that is none, and for sessions: there, requests wait for
    answers.
    """
    try:
        trace = read_trace(path, seed)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput("trace", f"{path}: {error!r}") from error
    patterns = [
        Pattern(request.at_s, request.prompt_tokens, request.answer_tokens, _names(trace, number))
        for number, request in enumerate(trace.requests)
        if request.at_s is not None
    ]
    if len(patterns) < len(trace.requests) or not patterns:
        raise InvalidInput("trace", f"{path} has sessions; only requests with times are simulated")
    patterns.sort(key=lambda each: each.at_s)
    return Workload(trace.name, trace.block_tokens, patterns)


def _names(trace: Trace, number: int) -> NDArray[np.uint64]:
    """Of the blocks of a prompt: by the node of the tree of prompts, and the place in it."""
    path, sizes = trace.tree.paths[number], trace.tree.node_blocks
    parts = [
        (np.uint64(node) << np.uint64(_NODE_SHIFT)) + np.arange(size, dtype=np.uint64)
        for node, size in zip(path.tolist(), sizes[path].tolist(), strict=True)
    ]
    return np.concatenate(parts)


def generated(count: int, prompt_tokens: int, answer_tokens: int, seed: int) -> Workload:
    """Prompts that begin with one of 16 texts, which are half of them; lengths are exponential.

    Arrivals are random (Poisson), one per second before they are scaled.
    """
    rng = np.random.default_rng(seed)
    block_tokens, patterns, made = 512, [], 16 * 4096
    at_s = 0.0
    for _ in range(count):
        at_s += rng.exponential(1.0)
        tokens = max(16, int(rng.exponential(prompt_tokens)))
        blocks = -(-tokens // block_tokens)
        shared = min(blocks, prompt_tokens // 2 // block_tokens)
        first = int(rng.integers(16)) * 4096
        names = [*range(first, first + shared), *range(made, made + blocks - shared)]
        made += blocks - shared
        answer = max(1, int(rng.exponential(answer_tokens)))
        patterns.append(Pattern(at_s, tokens, answer, np.array(names, dtype=np.uint64)))
    return Workload("generated", block_tokens, patterns)
