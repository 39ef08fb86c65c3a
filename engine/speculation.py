"""Drafts: guesses at the next tokens of an answer, which one step computes and verifies together.

They are looked up in the sequence itself: what followed the latest earlier occurrence of its last
tokens. Answers that quote, summarise or correct their prompt, and whatever repeats itself, are
guessed well. That needs no second model, and no state that would have to travel.

**Exact.** A step computes the last known token and a draft behind it, and has logits after each
of these. The first token is chosen as ever. Where it is the first of the draft, the logits behind
that are those of a step of its own, and the next token is chosen from them as in that step, with
the parameters, penalties, grammar and random number of its position, and so on; the first token
that differs ends it. So drafts decide how many steps an answer takes, and none of its tokens.

**Cheap where it fails.** A token of a draft costs a part of a step, and saves a step if it and all
before it are right. It is computed if the chance of that is no less than the share of the step that
its cost is: with more sequences in a step a guess has to be better. The chance is that of the
request's guesses of late. A request whose guesses are not worth it goes on guessing one token a
step, for nothing but to see whether it would have been right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.request import Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.request import Request
    from engine.scheduler import StepItem
    from kvferry.config import NgramConfig
    from kvferry.ids import TokenIds

_CHANCE_AT_FIRST = 0.7
_CHANCE_MEMORY = 0.8
"""Share of the old value in the running mean: some five guesses are remembered."""


@dataclass(slots=True, eq=False)
class Trial:
    """A sequence of which a step chooses the next token, and the draft that it computes behind."""

    request: Request
    draft: tuple[int, ...]
    """Empty: none."""
    logits_row: int
    """Of the logits before the draft; those after each of its tokens follow."""
    accepted: int = 0
    """Tokens of the draft that were right so far."""
    is_over: bool = False
    """Whether one was wrong."""

    @property
    def next_row(self) -> int:
        """Of the logits from which the next token is chosen."""
        return self.logits_row + self.accepted

    def passes(self) -> bool:
        """Whether the answer goes on and the token it just got is the next one of the draft."""
        request, at = self.request, self.accepted
        if request.stage is not Stage.DECODING or at == len(self.draft):
            return False
        self.is_over = int(request.tokens[request.num_tokens - 1]) != self.draft[at]
        self.accepted += not self.is_over
        return not self.is_over


class Proposer(Protocol):
    """Guesses at what comes next."""

    def __call__(self, request: Request, most: int) -> TokenIds:
        """Up to `most` tokens after `request.known`, int32."""
        ...


@dataclass(slots=True, eq=False)
class _Record:
    """How a request's guesses do."""

    chance: float = _CHANCE_AT_FIRST
    """That a token is right if those before it are."""
    guess: tuple[int, int] | None = None
    """Position and token of one that was not computed."""

    def saw(self, is_right: bool) -> None:
        self.chance = _CHANCE_MEMORY * self.chance + (1 - _CHANCE_MEMORY) * is_right


class Drafts:
    """The drafts of one engine. Only the engine thread calls it."""

    def __init__(self, propose: Proposer, max_draft: int, step_cost_tokens: float) -> None:
        """`max_draft`: most tokens of a draft, at least one. `step_cost_tokens`: what a step costs
        beside its tokens, in tokens."""
        self.counters = {"draft_tokens": 0, "draft_tokens_accepted": 0}
        self._propose = propose
        self._max_draft = max_draft
        self._step_cost_tokens = step_cost_tokens
        self._records: dict[Request, _Record] = {}

    def add(
        self, items: Sequence[StepItem], tokens: int, slots: int, page_size: int
    ) -> list[StepItem]:
        """A planned step with drafts: `tokens` of them at most, that take no more than `slots`
        beyond those that the step takes anyway."""
        planned = sum(item.stop - item.start for item in items)
        share = planned / (planned + self._step_cost_tokens)
        slots = max(slots, 0)
        out: list[StepItem] = []
        for item in items:
            request = item.request
            # The last token of an answer is not computed: none is guessed for the place before it.
            most = min(tokens, len(request.tokens) - 1 - item.stop)
            if request.stage is not Stage.DECODING or most <= 0:
                out.append(item)
                continue
            own = max(request.held_kv.allocated_len, _round_up(item.stop, page_size))
            draft = self._draft(request, min(most, own + slots - item.stop), share)
            slots -= max(0, _round_up(item.stop + len(draft), page_size) - own)
            tokens -= len(draft)
            out.append(item._replace(draft=draft) if draft else item)
        return out

    def judge(self, trial: Trial) -> None:
        """Take note of what came of a draft."""
        self.counters["draft_tokens"] += len(trial.draft)
        self.counters["draft_tokens_accepted"] += trial.accepted
        record = self._records.get(trial.request)
        if record is not None:
            for _ in range(trial.accepted):
                record.saw(is_right=True)
            if trial.is_over:
                record.saw(is_right=False)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._records.pop(request, None)

    def _draft(self, request: Request, most: int, share: float) -> tuple[int, ...]:
        """Up to `most` tokens, each right with a chance of at least `share`."""
        record = self._records.setdefault(request, _Record())
        if record.guess is not None and record.guess[0] < request.num_tokens:
            at, token = record.guess
            record.saw(is_right=int(request.tokens[at]) == token)
            record.guess = None
        length = _length(record.chance, share, min(most, self._max_draft))
        proposed = self._propose(request, max(length, 1)).tolist()
        if proposed and length == 0:
            record.guess = (request.num_tokens, proposed[0])
        return _up_to_stop(proposed[:length], request.stop_ids)


def drafts_of(config: NgramConfig) -> Drafts | None:
    """What proposes by n-grams as configured; None if that is not wanted."""
    if config.max_draft == 0:
        return None

    def propose(request: Request, most: int) -> TokenIds:
        return propose_by_ngram(request.known, most, config.match_min, config.match_max)

    return Drafts(propose, config.max_draft, config.step_cost_tokens)


def propose_by_ngram(known: TokenIds, most: int, match_min: int, match_max: int) -> TokenIds:
    """What followed the latest earlier occurrence of the last tokens of `known` [n], int32.

    As many of the last tokens as occurred before are looked for, `match_max` at most; nothing is
    proposed for fewer than `match_min`. What has a period goes on with it: there are `most` tokens
    even where fewer followed in the sequence itself.
    """
    last = len(known) - 1
    ends = np.flatnonzero(known[:last] == known[last])
    matched = min(len(ends), 1)
    while matched and matched < match_max:
        earlier = ends[ends >= matched]
        longer = earlier[known[earlier - matched] == known[last - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    if matched < match_min:
        return known[:0]
    end = int(ends[-1])
    return known[end + 1 + np.arange(most) % (last - end)]


def _length(chance: float, share: float, most: int) -> int:
    """The longest draft that is all right with a chance of at least `share`, `most` at most."""
    length, all_right = 0, chance
    while length < most and all_right >= share:
        length, all_right = length + 1, all_right * chance
    return length


def _up_to_stop(draft: Sequence[int], stop_ids: frozenset[int]) -> tuple[int, ...]:
    """Without the first token that would end the answer, and what is behind it: where it is
    chosen nothing more is needed, and before `min_tokens` it never is."""
    for at, token in enumerate(draft):
        if token in stop_ids:
            return tuple(draft[:at])
    return tuple(draft)


def _round_up(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size
