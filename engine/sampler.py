"""Choosing the next token of every sequence of a step, by array operations over the batch.

Order: logit bias, penalties, bans, the mask of a constraint, temperature, top-k, top-p (of what
top-k left), min-p, draw.
Log probabilities are the model's own: taken before any of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.drawing import block_sums, draw, weights_of
from engine.ranking import most_likely
from kvferry.generation import OutputToken, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from kvferry.ids import TokenIds
    from kvferry.sampling import SamplingParams

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32."""
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRow:
    """One sequence of the step that wants a token."""

    params: SamplingParams
    prompt: TokenIds
    output: TokenIds
    """Tokens generated so far."""
    banned: tuple[int, ...]
    """Ids that may not be chosen now: ends, while the output is shorter than min_tokens. Of no
    effect with `allowed`, which knows of them."""
    allowed: NDArray[np.uint8] | None = None
    """[ceil(V / 8)], one bit per token, lowest first, at least one of them set; None: all."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.params.temperature < _GREEDY_BELOW

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
    def is_plain(self) -> bool:
        """Whether the most likely token of the model's logits is all that is asked for."""
        return self.is_greedy and self.keeps_scores and self.params.logprobs is None


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[OutputToken]:
    """The next token of each row. logits float32 [R, V] are left unchanged.

    A row's token depends on its own logits, parameters, seed and number of output tokens only, so
    that it is the same in any batch, and after a resume.
    """
    assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits, {len(rows)} sequences"
    if all(row.is_plain for row in rows):
        return [OutputToken(token) for token in _best(logits)]
    # Of a device: there only the most likely tokens are found, the rest is arithmetic here.
    values: NDArray[np.float32] = logits.cpu().numpy()
    # Logits that are no numbers are the model's fault, and end nobody else's answer.
    with np.errstate(all="ignore"):
        scores = _adjusted(values, rows)
        chosen = scores.argmax(axis=1)
        drawn = [index for index, row in enumerate(rows) if not row.is_greedy]
        if drawn:
            own = scores if len(drawn) == len(rows) else scores[drawn]
            params = [rows[index].params for index in drawn]
            uniforms = [uniform(rows[at].params.seed, len(rows[at].output)) for at in drawn]
            chosen[drawn] = draw(own, params, uniforms)
        return _with_logprobs(values, rows, chosen.tolist())


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


# --- scores ---------------------------------------------------------------------------------


def _adjusted(logits: NDArray[np.float32], rows: Sequence[SamplingRow]) -> NDArray[np.float32]:
    """Logits after bias, penalties, bans and masks; `logits` itself where no row has any."""
    if all(row.keeps_scores for row in rows):
        return logits
    scores = logits.copy()
    for own, row in zip(scores, rows, strict=True):
        if row.params.logit_bias:
            bias = row.params.logit_bias
            own[list(bias)] += np.asarray(list(bias.values()), dtype=np.float32)
        if row.has_penalties:
            _penalize(own, row)
        if row.allowed is not None:
            allowed = np.unpackbits(row.allowed, count=len(own), bitorder="little")
            own[allowed == 0] = -np.inf
        elif row.banned:
            own[list(row.banned)] = -np.inf
    return scores


def _penalize(scores: NDArray[np.float32], row: SamplingRow) -> None:
    """Change the scores [V] of one row in place.

    A token that occurs several times is written several times, with the same value.
    """
    params = row.params
    if params.repetition_penalty != 1.0:
        penalty = np.float32(params.repetition_penalty)
        seen = np.concatenate((row.prompt, row.output))
        before = scores[seen]
        scores[seen] = np.where(before > 0, before / penalty, before * penalty)
    if len(row.output) and (params.presence_penalty or params.frequency_penalty):
        counts = np.bincount(row.output)[row.output]
        losses = params.presence_penalty + params.frequency_penalty * counts
        scores[row.output] -= losses.astype(np.float32)


# --- logprobs -------------------------------------------------------------------------------


def _with_logprobs(
    logits: NDArray[np.float32], rows: Sequence[SamplingRow], tokens: list[int]
) -> list[OutputToken]:
    out = [OutputToken(token) for token in tokens]
    asked = [(at, row.params.logprobs) for at, row in enumerate(rows)]
    counts = {index: count for index, count in asked if count is not None}
    if not counts:
        return out
    own = logits if len(counts) == len(rows) else logits[list(counts)]
    norms = own.max(axis=1) + np.log(block_sums(weights_of(own)).sum(axis=1))
    of_chosen = own[np.arange(len(own)), [tokens[index] for index in counts]] - norms
    best, ids = most_likely(own, max(1, *counts.values()))
    best_lists, id_lists = (best - norms[:, None]).tolist(), ids.tolist()
    for place, (index, count) in enumerate(counts.items()):
        pairs = zip(id_lists[place][:count], best_lists[place][:count], strict=True)
        entry = TokenLogprobs(tokens[index], float(of_chosen[place]), tuple(pairs))
        out[index] = OutputToken(tokens[index], entry)
    return out
