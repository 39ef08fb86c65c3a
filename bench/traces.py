"""Traces of requests in the formats in which they are published, read into one form.

Known by their content, not by their names: Mooncake (`timestamp`, `hash_ids`), sessions with block
ids as runs (`session`, `hash_runs`), WEKA agent sessions (`requests` with sub-agents), Azure
(`TIMESTAMP,ContextTokens,GeneratedTokens`) and ServeGen (rates of clients per window).
"""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.prompt_tree import PromptTree, PromptTreeBuilder
from router.policies.pool import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

LONG_CONTEXT_CACHE_TOKENS = 3_000_000
TEXT_CACHE_TOKENS = 200_000
_SERVEGEN_REQUESTS = 10_000
_OPAQUE_BLOCK_TOKENS = 512
"""Prompts of which only the length is known share nothing."""


class UnknownTraceFormat(ValueError):
    """The file is in none of the formats above."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Its place in `Trace.requests` is its number."""

    prompt_tokens: int
    answer_tokens: int
    session: int
    at_s: float | None = None
    """When it arrives in an open loop; None: with its session."""
    think_s: float = 0.0
    """Between the end of the answer that it follows and its arrival."""
    followers: list[int] = field(default_factory=list)
    """Requests that follow its answer."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A workload. Times are as recorded; the replay scales them to a load."""

    name: str
    block_tokens: int
    cache_tokens: int
    """Of each worker."""
    requests: tuple[TraceRequest, ...]
    starts: tuple[int, ...]
    """Requests that follow no other: one per session, or all in an open loop."""
    tree: PromptTree
    prompts: tuple[Prompt, ...]
    """What the router sees of each request; prefixes are named by the nodes of the tree."""

    @property
    def is_open_loop(self) -> bool:
        """Whether requests come at recorded times."""
        return self.requests[self.starts[0]].at_s is not None


class _TraceBuilder:
    def __init__(self, name: str, block_tokens: int, cache_tokens: int) -> None:
        self._name = name
        self._block_tokens = block_tokens
        self._cache_tokens = cache_tokens
        self._requests: list[TraceRequest] = []
        self._starts: list[int] = []
        self._tree = PromptTreeBuilder()
        self._opaque = 0

    def add(
        self,
        lengths: tuple[int, int],
        blocks: NDArray[np.int64] | None,
        session: int,
        *,
        space: int = 0,
        at_s: float | None = None,
        follows: tuple[int, float] | None = None,
    ) -> int:
        """Add a request of (prompt, answer) tokens; `follows` is (request, think time)."""
        number = len(self._requests)
        if blocks is None:
            count = max(1, -(-lengths[0] // self._block_tokens))
            blocks = np.arange(self._opaque, self._opaque + count, dtype=np.int64)
            self._opaque += count
        think_s = 0.0
        if follows is None:
            self._starts.append(number)
        else:
            self._requests[follows[0]].followers.append(number)
            think_s = follows[1]
        self._requests.append(TraceRequest(*lengths, session, at_s, think_s))
        self._tree.add(space, blocks)
        return number

    def build(self) -> Trace:
        tree = self._tree.build()
        return Trace(
            name=self._name,
            block_tokens=self._block_tokens,
            cache_tokens=self._cache_tokens,
            requests=tuple(self._requests),
            starts=tuple(self._starts),
            tree=tree,
            prompts=tuple(
                self._prompt(request, path, tree)
                for request, path in zip(self._requests, tree.paths, strict=True)
            ),
        )

    def _prompt(self, request: TraceRequest, path: NDArray[np.int64], tree: PromptTree) -> Prompt:
        ends = np.cumsum(tree.node_blocks[path]) * self._block_tokens
        return Prompt(request.prompt_tokens, path.astype(np.uint64), ends, request.session + 1)


def read_trace(path: Path, seed: int = 0) -> Trace:
    """Read a trace, plain or gzip. `seed` draws what a trace of rates leaves open.

    Raises `UnknownTraceFormat` and `OSError`.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    if not lines:
        raise UnknownTraceFormat(f"{path} is empty")
    if lines[0].startswith("TIMESTAMP,"):
        return _read_azure(_name(path), lines)
    try:
        first = json.loads(lines[0])
    except json.JSONDecodeError as error:
        raise UnknownTraceFormat(f"{path}: first line: {error}") from error
    if not isinstance(first, dict):
        raise UnknownTraceFormat(f"{path}: a row is no object")
    if "clients" in first:
        return _read_servegen(_name(path), first, np.random.default_rng(seed))
    rows = [json.loads(line) for line in lines]
    for key, read in (
        ("hash_ids", _read_mooncake),
        ("hash_runs", _read_sessions),
        ("requests", _read_weka),
    ):
        if key in first:
            return read(_name(path), rows)
    raise UnknownTraceFormat(f"{path}: a row has {', '.join(sorted(first))}")


def _name(path: Path) -> str:
    stem = path.name.split(".")[0]
    return path.parent.name if stem == "trace" else stem


def _blocks(runs: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    parts = [np.arange(first, first + count, dtype=np.int64) for first, count in runs]
    return np.concatenate(parts)


def _read_mooncake(name: str, rows: list[dict[str, Any]]) -> Trace:
    trace = _TraceBuilder(name, 512, LONG_CONTEXT_CACHE_TOKENS)
    for row in rows:
        blocks = np.array(row["hash_ids"], dtype=np.int64)
        lengths = (row["input_length"], row["output_length"])
        # The trace names no sessions; its first block of its own is the nearest to one.
        session = int(blocks[min(1, blocks.size - 1)])
        trace.add(lengths, blocks, session, at_s=row["timestamp"] / 1000)
    return trace.build()


def _read_sessions(name: str, rows: list[dict[str, Any]]) -> Trace:
    trace = _TraceBuilder(name, 16, TEXT_CACHE_TOKENS)
    last: dict[str, int] = {}
    sessions: dict[str, int] = {}
    for row in rows:
        key = row["session"]
        session = sessions.setdefault(key, len(sessions))
        follows = (last[key], row["think"]) if key in last else None
        lengths = (row["input_length"], row["output_length"])
        last[key] = trace.add(lengths, _blocks(row["hash_runs"]), session, follows=follows)
    return trace.build()


def _read_weka(name: str, rows: list[dict[str, Any]]) -> Trace:
    trace = _TraceBuilder(name, rows[0]["block_size"], LONG_CONTEXT_CACHE_TOKENS)
    for session, row in enumerate(rows):
        _add_agent(trace, row["requests"], session, None)
    return trace.build()


def _add_agent(
    trace: _TraceBuilder, calls: list[Any], session: int, parent: tuple[int, float] | None
) -> None:
    """Add the calls of an agent; a sub-agent starts with the answer of the call before it."""
    previous = parent
    ended_s = 0.0
    for call in calls:
        if isinstance(call, dict):
            # Spawned by the answer before it; what passed since then it did not wait for us.
            spawned = None
            if previous is not None:
                spawned = (previous[0], max(0.0, call["t"] - ended_s))
            _add_agent(trace, call["sub"], session, spawned)
            continue
        at_s, think_s, api_s, prompt, answer, runs = call[:6]
        follows = None if previous is None else (previous[0], previous[1] + (think_s or 0.0))
        number = trace.add((prompt, answer), _blocks(runs), session, space=session, follows=follows)
        previous = (number, 0.0)
        ended_s = at_s + (api_s or 0.0)


def _read_azure(name: str, lines: list[str]) -> Trace:
    trace = _TraceBuilder(name, _OPAQUE_BLOCK_TOKENS, LONG_CONTEXT_CACHE_TOKENS)
    for number, row in enumerate(csv.DictReader(lines)):
        # Seven digits of a second; Python takes six.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        lengths = (int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        trace.add(lengths, None, number, at_s=at)
    return trace.build()


def _read_servegen(name: str, model: dict[str, Any], rng: np.random.Generator) -> Trace:
    """Draw requests of the busiest window: clients by rate, lengths by their quantiles."""
    rates: dict[float, float] = {}
    for client in model["clients"]:
        for at_s, rate, *_ in client["windows"]:
            rates[at_s] = rates.get(at_s, 0.0) + rate
    window_s = max(rates, key=rates.__getitem__)
    arrivals: list[tuple[float, int, int]] = []
    share = _SERVEGEN_REQUESTS / rates[window_s]
    for client in model["clients"]:
        arrivals += _client_arrivals(client, window_s, share, model["quantiles"], rng)
    trace = _TraceBuilder(name, _OPAQUE_BLOCK_TOKENS, LONG_CONTEXT_CACHE_TOKENS)
    for number, (at_s, prompt, answer) in enumerate(sorted(arrivals)):
        trace.add((prompt, answer), None, number, at_s=at_s)
    return trace.build()


def _client_arrivals(
    client: dict[str, Any],
    window_s: float,
    duration_s: float,
    quantiles: list[float],
    rng: np.random.Generator,
) -> list[tuple[float, int, int]]:
    """(arrival, prompt tokens, answer tokens) of one client, as if its window went on."""
    found = [window for window in client["windows"] if window[0] == window_s]
    if not found:
        return []
    _, rate, _, pattern, shape, _ = found[0]
    count = rng.poisson(rate * duration_s)
    gaps = rng.gamma(shape, 1, count) if pattern == "G" else rng.weibull(shape, count)
    total = gaps.sum()
    if not count or not total:
        return []
    times = (np.cumsum(gaps) - gaps[0] * rng.random()) / total * duration_s
    period = max((key for key in client["lengths"] if float(key) <= window_s), key=float)
    prompts, answers = (
        np.interp(rng.random(count), quantiles, column).astype(int).clip(1)
        for column in client["lengths"][period]
    )
    return list(zip(times.tolist(), prompts.tolist(), answers.tolist(), strict=True))
