"""Choosing the next token of every sequence of a step, by array operations over the batch.

Order: logit bias, penalties, bans, the mask of a constraint, temperature, top-k, top-p (of what
top-k left), min-p, draw.
Log probabilities are the model's own: taken before any of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvferry.generation import OutputToken, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvferry.ids import TokenIds
    from kvferry.sampling import SamplingParams

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32."""
_NUCLEUS_CANDIDATES = 512
"""Most likely tokens looked at first for top-p; the whole vocabulary is sorted only where their
probability does not reach top_p."""
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
    if not all(row.is_plain for row in rows):
        # Of a device: there only the most likely tokens are found, the rest is arithmetic here.
        logits = logits.cpu()
    scores = _adjusted(logits, rows)
    chosen = scores.argmax(dim=-1)
    drawn = [index for index, row in enumerate(rows) if not row.is_greedy]
    if drawn:
        chosen[drawn] = _draw(scores[drawn], [rows[index] for index in drawn])
    tokens = chosen.tolist()
    if all(row.params.logprobs is None for row in rows):
        return [OutputToken(token) for token in tokens]
    return _with_logprobs(logits, rows, tokens)


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


def _adjusted(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Logits after bias, penalties and bans; `logits` itself where no row has any."""
    if all(row.keeps_scores for row in rows):
        return logits
    scores = logits.clone()
    _add_bias(scores, rows)
    for index, row in enumerate(rows):
        if row.has_penalties:
            _penalize(scores[index], row)
    banned = [
        (index, token)
        for index, row in enumerate(rows)
        if row.allowed is None
        for token in row.banned
    ]
    if banned:
        where = torch.tensor(banned)
        scores[where[:, 0], where[:, 1]] = -torch.inf
    _mask(scores, rows)
    return scores


def _mask(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Rule out, in place, what the constraints of the rows do not allow."""
    masks = {index: row.allowed for index, row in enumerate(rows) if row.allowed is not None}
    if masks:
        bits = np.stack(list(masks.values()))
        allowed = np.unpackbits(bits, axis=1, count=scores.shape[1], bitorder="little")
        at = torch.tensor(list(masks))
        scores[at] = scores[at].masked_fill(torch.from_numpy(allowed) == 0, -torch.inf)


def _add_bias(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [
        (index, token, bias)
        for index, row in enumerate(rows)
        for token, bias in row.params.logit_bias.items()
    ]
    if entries:
        indices, tokens, biases = zip(*entries, strict=True)
        scores[torch.tensor(indices), torch.tensor(tokens)] += torch.tensor(biases)


def _penalize(scores: torch.Tensor, row: SamplingRow) -> None:
    """Change the scores [V] of one row in place."""
    params = row.params
    output, counts = np.unique(row.output, return_counts=True)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.union1d(row.prompt, output).astype(np.int64))
        before = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(before > 0, before / penalty, before * penalty)
    if len(output) and (params.presence_penalty or params.frequency_penalty):
        losses = params.presence_penalty + params.frequency_penalty * counts
        at = torch.from_numpy(output.astype(np.int64))
        scores[at] -= torch.from_numpy(losses.astype(np.float32))


# --- drawing --------------------------------------------------------------------------------


def _draw(scores: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """Token ids int64 [S] drawn from scores [S, V]."""
    temperatures = _column([row.params.temperature for row in rows])
    scaled = scores / temperatures
    uniforms = _column([uniform(row.params.seed, len(row.output)) for row in rows])
    ranked = [_needs_ranking(row.params, scores.shape[1]) for row in rows]
    chosen = torch.empty(len(rows), dtype=torch.int64)
    for wanted, draw in ((True, _draw_ranked), (False, _draw_unranked)):
        group = [index for index, is_ranked in enumerate(ranked) if is_ranked is wanted]
        if group:
            params = [rows[index].params for index in group]
            chosen[group] = draw(scaled[group], params, uniforms[group])
    return chosen


def _needs_ranking(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1.0


def _draw_unranked(
    scores: torch.Tensor, params: list[SamplingParams], uniforms: torch.Tensor
) -> torch.Tensor:
    """Over the whole vocabulary, in the order of ids: nothing has to be sorted."""
    probabilities = scores.softmax(dim=-1, dtype=torch.float64)
    return _invert(_apply_min_p(probabilities, params), uniforms)


def _draw_ranked(
    scores: torch.Tensor, params: list[SamplingParams], uniforms: torch.Tensor
) -> torch.Tensor:
    """Over the most likely tokens, best first."""
    vocab_size = scores.shape[1]
    limits = [min(one.top_k or vocab_size, vocab_size) for one in params]
    wanted = max(limit if limit < vocab_size else _NUCLEUS_CANDIDATES for limit in limits)
    top_p = _column([one.top_p for one in params])
    limit = torch.tensor(limits)[:, None]
    total = scores.double().logsumexp(dim=-1, keepdim=True)
    while True:
        count = min(wanted, vocab_size)
        best, ids = _most_likely(scores, count)
        within_k = torch.arange(count)[None, :] < limit
        mass = torch.exp(best.double() - total) * within_k
        # What top-k keeps is the distribution that top-p looks at.
        kept_mass = torch.where(limit < vocab_size, mass.sum(dim=-1, keepdim=True), 1.0)
        probabilities = mass / kept_mass
        reached = probabilities.cumsum(dim=-1)
        if count == vocab_size or bool(((reached[:, -1:] >= top_p) | (limit <= count)).all()):
            break
        wanted = vocab_size
    nucleus = probabilities * (reached - probabilities < top_p)
    picked = _invert(_apply_min_p(nucleus, params), uniforms)
    return ids.gather(1, picked[:, None])[:, 0]


def _most_likely(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest of scores [S, V] and their ids, [S, count] each, best first.

    Of equal ones the lowest id comes first: `topk` orders them by what else is in the batch.
    """
    _, ids = scores.topk(count, dim=-1)
    if count == 0:
        return scores[:, :0], ids
    ids = ids.sort(dim=-1).values
    best, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    least = best[:, -1:]
    # Which of those that equal the last one are among them is chance, too. What is ruled out is
    # never drawn, whatever its place.
    unsure = ((scores >= least).sum(dim=-1) > count) & (least[:, 0] > -torch.inf)
    if bool(unsure.any()):
        ranked = scores[unsure].sort(dim=-1, descending=True, stable=True)
        best[unsure], ids[unsure] = ranked.values[:, :count], ranked.indices[:, :count]
    return best, ids


def _apply_min_p(probabilities: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    if all(one.min_p == 0.0 for one in params):
        return probabilities
    least = _column([one.min_p for one in params]) * probabilities.amax(dim=-1, keepdim=True)
    return probabilities * (probabilities >= least)


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index [S] of the weight (float64 [S, n], any positive sum) that each uniform falls on."""
    reached = weights.cumsum(dim=-1)
    total = reached[:, -1:]
    # A uniform below 1 times the sum may round up to the sum, where no weight is left.
    targets = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    picked = torch.searchsorted(reached, targets, right=True)[:, 0]
    # Only logits that are no numbers get here beyond the end: any id is as good, none must crash.
    return picked.clamp_(max=weights.shape[1] - 1)


def _column(values: Sequence[float]) -> torch.Tensor:
    """float64 [S, 1]."""
    return torch.tensor(values, dtype=torch.float64)[:, None]


# --- logprobs -------------------------------------------------------------------------------


def _with_logprobs(
    logits: torch.Tensor, rows: Sequence[SamplingRow], tokens: list[int]
) -> list[OutputToken]:
    asked = {index: row.params.logprobs for index, row in enumerate(rows)}
    wanted = [index for index, count in asked.items() if count is not None]
    logprobs = logits[wanted].log_softmax(dim=-1)
    at = torch.tensor([tokens[index] for index in wanted])
    of_chosen = logprobs.gather(1, at[:, None])[:, 0].tolist()
    most = max(count for count in asked.values() if count is not None)
    best, ids = _most_likely(logprobs, min(most, logprobs.shape[1]))
    best_lists, id_lists = best.tolist(), ids.tolist()
    out = [OutputToken(token) for token in tokens]
    for place, index in enumerate(wanted):
        count = rows[index].params.logprobs
        pairs = zip(id_lists[place][:count], best_lists[place][:count], strict=True)
        entry = TokenLogprobs(tokens[index], of_chosen[place], tuple(pairs))
        out[index] = OutputToken(tokens[index], entry)
    return out
