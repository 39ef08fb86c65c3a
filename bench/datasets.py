"""Workloads that are generated, or read from files of prompts; `workload_of` chooses."""

from __future__ import annotations

import gzip
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.plan import DatasetKind
from bench.trace_workload import fitted, trace_workload
from bench.workload import Planned, TokenSource, Workload
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.plan import DatasetPlan
    from bench.workload import Prompt

_PREFIX, _OWN, _LENGTHS, _ORDER = range(4)
"""First names of tokens and draws, so that none of them are those of another."""
_HUMAN = ("human", "user")


def workload_of(plan: DatasetPlan, seed: int, vocab_size: int) -> Workload:
    """A function of its arguments alone. Raises `InvalidInput` naming the flag at fault."""
    if plan.kind in (DatasetKind.PROMPTS, DatasetKind.SHAREGPT):
        return _of_texts(plan)
    if vocab_size < 1:
        raise InvalidInput("vocab-size", "must be given: this server does not tell it")
    tokens = TokenSource(seed, vocab_size)
    if plan.kind is DatasetKind.TRACE:
        return trace_workload(plan, tokens, seed)
    return _generated(plan, tokens, seed)


@dataclass(frozen=True, slots=True)
class _Segments:
    """Prompts of token segments, each (tokens, its names)."""

    tokens: TokenSource
    segments: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]

    def prompt(self, index: int) -> Prompt:
        """[tokens] int32."""
        parts = [self.tokens.tokens(count, *names) for count, names in self.segments[index]]
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class _Texts:
    texts: tuple[str, ...]

    def prompt(self, index: int) -> Prompt:
        """The text."""
        return self.texts[index]


def _generated(plan: DatasetPlan, tokens: TokenSource, seed: int) -> Workload:
    turns = plan.turns if plan.kind is DatasetKind.MULTI_TURN else 1
    draws = np.random.default_rng((seed, _LENGTHS))
    low, high = (
        max(1, round(plan.prompt_tokens * (1 + part * plan.length_spread))) for part in (-1, 1)
    )
    lengths = draws.integers(low, high + 1, plan.requests_max).tolist()
    groups = np.arange(plan.requests_max) % plan.groups
    np.random.default_rng((seed, _ORDER)).shuffle(groups)
    requests: list[Planned] = []
    segments: list[tuple[tuple[int, tuple[int, ...]], ...]] = []
    for index, own in enumerate(lengths):
        chain, turn = divmod(index, turns)
        before = _before(plan, chain, turn, int(groups[index]), segments)
        new = (own, (_OWN, chain, turn, 0))
        segments.append(_cut(plan, (*before, new)))
        has_next = turn + 1 < turns and index + 1 < plan.requests_max
        followers = (index + 1,) if has_next else ()
        requests.append(
            Planned(chain, chain, _answer_tokens(plan, segments[-1]), None, 0.0, followers)
        )
    starts = tuple(range(0, len(requests), turns))
    return Workload(plan.kind.value, tuple(requests), starts, _Segments(tokens, tuple(segments)))


def _before(
    plan: DatasetPlan, chain: int, turn: int, group: int, segments: Sequence[Any]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """What a prompt begins with: the group's prefix, or the conversation so far.

    An answer is stood in for by as many tokens of ours: prompts must not hang on what a model says.
    """
    if plan.kind is DatasetKind.SHARED_PREFIX and plan.prefix_tokens:
        return ((plan.prefix_tokens, (_PREFIX, group)),)
    if plan.kind is not DatasetKind.MULTI_TURN:
        return ()
    if turn:
        return (*segments[-1], (plan.answer_tokens, (_OWN, chain, turn, 1)))
    # All conversations begin with the same instructions.
    return ((plan.prefix_tokens, (_PREFIX, 0)),) if plan.prefix_tokens else ()


def _cut(plan: DatasetPlan, segments: tuple[Any, ...]) -> tuple[Any, ...]:
    left, _ = fitted(plan, sum(count for count, _ in segments), plan.answer_tokens)
    kept = []
    for count, names in segments:
        count_kept = min(count, left)
        left -= count_kept
        if count_kept:
            kept.append((count_kept, names))
    return tuple(kept)


def _answer_tokens(plan: DatasetPlan, segments: tuple[Any, ...]) -> int:
    return fitted(plan, sum(count for count, _ in segments), plan.answer_tokens)[1]


def _of_texts(plan: DatasetPlan) -> Workload:
    path = Path(plan.path)
    read = _read_prompts if plan.kind is DatasetKind.PROMPTS else _read_sharegpt
    try:
        rows = read(_text_of(path), plan)
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        problem = f"no prompts can be read from {plan.path!r}: {error!r}"
        raise InvalidInput("path", problem) from error
    if not rows:
        raise InvalidInput("path", f"{plan.path!r} holds no prompt")
    return _chained(path.name.split(".")[0], rows[: plan.requests_max])


@dataclass(frozen=True, slots=True)
class _Row:
    session: str
    text: str
    answer_tokens: int
    think_s: float


def _chained(name: str, rows: Sequence[_Row]) -> Workload:
    numbers: dict[str, int] = {}
    last: dict[str, int] = {}
    followers: dict[int, tuple[int, ...]] = {}
    starts: list[int] = []
    for index, row in enumerate(rows):
        numbers.setdefault(row.session, len(numbers))
        if row.session in last:
            followers[last[row.session]] = (index,)
        else:
            starts.append(index)
        last[row.session] = index
    requests = tuple(
        Planned(
            chain=numbers[row.session],
            session=numbers[row.session],
            answer_tokens=row.answer_tokens,
            think_s=row.think_s,
            followers=followers.get(index, ()),
        )
        for index, row in enumerate(rows)
    )
    return Workload(name, requests, tuple(starts), _Texts(tuple(row.text for row in rows)))


def _text_of(path: Path) -> str:
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    with openers.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        return str(file.read())


def _read_prompts(text: str, plan: DatasetPlan) -> list[_Row]:
    """Lines of JSON with `prompt`, and optionally `session`, `think` (s) and `output_length`."""
    rows = []
    for number, line in enumerate(text.splitlines()):
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"line {number + 1}: is no object")
        answer = int(row.get("output_length", plan.answer_tokens))
        session = str(row.get("session", f"line-{number}"))
        prompt = row["prompt"]
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"line {number + 1}: prompt is no text")
        rows.append(_Row(session, prompt, max(1, answer), float(row.get("think", 0.0))))
    return rows


def _read_sharegpt(text: str, plan: DatasetPlan) -> list[_Row]:
    """A JSON list of `conversations` of turns (`from`, `value`); each of the user's is a prompt,
    behind all that was said before."""
    rows = []
    for number, talk in enumerate(json.loads(text)):
        said: list[str] = []
        for turn in talk["conversations"]:
            is_user = turn["from"] in _HUMAN
            said.append(f"{'User' if is_user else 'Assistant'}: {turn['value']}\n")
            if is_user:
                prompt = "".join(said) + "Assistant:"
                rows.append(_Row(str(talk.get("id", number)), prompt, plan.answer_tokens, 0.0))
    return rows
