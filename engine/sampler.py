"""Choosing the next token of every sequence of a step.

Order: logit bias, penalties, bans, the mask of a constraint, temperature, top-k, top-p (of what
top-k left), min-p, draw.
Log probabilities are the model's own: taken before any of these.

Passes over the vocabulary are compiled, and shared by the crew that computes the model: each row is
an item of `engine.sampling_step`. Where all take the most likely token, and ask for nothing else,
numpy finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.crew import Crew
from engine.sampling_step import SamplingStep
from kvferry.generation import OutputToken, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from kvferry.ids import TokenIds
    from kvferry.sampling import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32."""
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class SamplingRow(NamedTuple):
    """One sequence of the step that wants a token. A tuple, because one is made per token."""

    params: SamplingParams
    known: TokenIds
    """Prompt and answer so far, int32."""
    prompt_len: int
    banned: tuple[int, ...]
    """Ids that may not be chosen now: ends, while the output is shorter than min_tokens. Of no
    effect with `allowed`, which knows of them."""
    allowed: NDArray[np.uint8] | None = None
    """[ceil(V / 8)], one bit per token, lowest first, at least one of them set; None: all."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.params.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before change the scores."""
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    @property
    def keeps_scores(self) -> bool:
        """Whether the model's logits are used as they are."""
        is_free = self.allowed is None and not self.banned
        return is_free and not (self.params.logit_bias or self.has_penalties)

    @property
    def takes_best(self) -> bool:
        """Whether the most likely token of the model's logits is chosen."""
        return self.is_greedy and self.keeps_scores

    @property
    def is_plain(self) -> bool:
        """Whether that is all that is asked for."""
        return self.takes_best and self.params.logprobs is None


class Sampler:
    """Chooses tokens, on the engine thread and the others of a crew."""

    def __init__(self, crew: Crew | None = None) -> None:
        """`crew`: None chooses on the calling thread alone."""
        self._alone = Crew(1)
        self._crew = crew or self._alone

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], at: Sequence[int] | None = None
    ) -> list[OutputToken]:
        """The next token of each row. logits float32 [N, V] are left unchanged; row i wants one of
        `logits[at[i]]`, by default of `logits[i]`.

        A row's token depends on its own logits, parameters, seed and number of output tokens only,
        so that it is the same in any batch, and after a resume.
        """
        at = range(len(logits)) if at is None else at
        assert len(at) == len(rows), f"{len(at)} rows of logits, {len(rows)} sequences"
        if all(row.is_plain for row in rows):
            best = _best(logits)
            return [OutputToken(best[number]) for number in at]
        # Of a device: there only the most likely tokens are found, the rest is arithmetic here.
        values: NDArray[np.float32] = np.ascontiguousarray(logits.cpu().numpy())
        with np.errstate(all="ignore"):
            return self._sample(values, rows, at)

    def _sample(
        self, logits: NDArray[np.float32], rows: Sequence[SamplingRow], at: Sequence[int]
    ) -> list[OutputToken]:
        """First come the items of all rows, then one more of each row that is told the log
        probabilities of logits from which it does not simply take the best."""
        step = SamplingStep(logits)
        for row, of in zip(rows, at, strict=True):
            _ask(step, step.item(of), row)
        tellers: dict[int, int] = {}
        for n, row in enumerate(rows):
            if row.params.logprobs is not None:
                tellers[n] = n if row.takes_best else step.item(at[n])
                step.tell(tellers[n], row.params.logprobs)
        # Waking others takes as long as one pass over some rows.
        step.run(self._crew.board if step.is_long else self._alone.board)
        out = [OutputToken(token) for token in step.chosen[: len(rows)]]
        for n, item in tellers.items():
            token = out[n].token_id
            logprob = float(logits[at[n], token]) - step.norm(item)
            out[n] = OutputToken(token, TokenLogprobs(token, logprob, step.told(item)))
        return out


def _ask(step: SamplingStep, item: int, row: SamplingRow) -> None:
    """What a row wants of its item."""
    if row.takes_best:
        return
    params = row.params
    banned = () if row.allowed is not None else row.banned
    if params.logit_bias or banned:
        step.add(item, {**params.logit_bias, **dict.fromkeys(banned, -np.inf)})
    if row.allowed is not None:
        step.allow(item, row.allowed)
    if row.has_penalties:
        step.penalize(item, params, row.known, row.prompt_len)
    if not row.is_greedy:
        step.draw(item, params, uniform(params.seed, len(row.known) - row.prompt_len))


def _best(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row; of equal ones the first."""
    if logits.is_cpu:
        # Some 30 times faster than torch's on one thread.
        on_host: list[int] = logits.numpy().argmax(axis=1).tolist()
        return on_host
    on_device: list[int] = logits.argmax(dim=-1).tolist()
    return on_device


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of seed and position alone.

    Two rounds of the SplitMix64 mixer over the seed and a counter (Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", OOPSLA 2014): no state to carry in a handoff.
    """
    mixed = _mix((_mix((seed + _GOLDEN) & _WORD) + (position + 1) * _GOLDEN) & _WORD)
    return (mixed >> 11) * 2.0**-53


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
