"""The choice of a token: each parameter, its distribution, and its independence of the batch."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from engine.crew import Crew
from engine.sampler import Sampler, SamplingRow, uniform
from kvferry.generation import OutputToken
from kvferry.sampling import SamplingParams

VOCAB = 40
sample = Sampler().sample
DRAWS = 2000


def _row(
    output: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (1,),
    banned: tuple[int, ...] = (),
    **params: Any,
) -> SamplingRow:
    return SamplingRow(
        SamplingParams(**params),
        np.asarray(prompt + output, dtype=np.int32),
        len(prompt),
        banned,
    )


def _logits(seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def _frequencies(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """Share of each token over many seeds, at temperature 1 unless told."""
    rows = [_row(seed=seed, **params) for seed in range(DRAWS)]
    chosen = [token.token_id for token in sample(logits.expand(DRAWS, -1), rows)]
    return torch.bincount(torch.tensor(chosen), minlength=len(logits)) / DRAWS


def _assert_distribution(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found[expected == 0].sum() == 0, "a token that was cut off"
    # Five standard deviations of a share; a rare token may come up a few times all the same.
    bound = 5 * (expected * (1 - expected) / DRAWS).sqrt() + 3 / DRAWS
    assert ((found - expected).abs() <= bound).all()


def _only(probabilities: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    cut = torch.where(kept, probabilities, torch.zeros_like(probabilities))
    return cut / cut.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_temperature(temperature: float) -> None:
    logits = _logits()
    found = _frequencies(logits, temperature=temperature)
    _assert_distribution(found, (logits.double() / temperature).softmax(0))


@pytest.mark.parametrize("top_k", [1, 5, VOCAB - 1, VOCAB, 1000])
def test_top_k(top_k: int) -> None:
    logits = _logits()
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    kept[logits.topk(min(top_k, VOCAB)).indices] = True
    _assert_distribution(_frequencies(logits, top_k=top_k), _only(logits.double().softmax(0), kept))


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest tokens, best first, whose probability reaches top_p."""
    kept = torch.zeros(len(probabilities), dtype=torch.bool)
    total = 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if total >= top_p:
            break
        kept[token] = True
        total += float(probabilities[token])
    return kept


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_top_p(top_p: float) -> None:
    logits = _logits()
    probabilities = logits.double().softmax(0)
    expected = _only(probabilities, _nucleus(probabilities, top_p))
    _assert_distribution(_frequencies(logits, top_p=top_p), expected)


def test_top_p_of_what_top_k_left() -> None:
    logits = _logits()
    probabilities = logits.double().softmax(0)
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    kept[logits.topk(8).indices] = True
    probabilities = _only(probabilities, kept)
    expected = _only(probabilities, _nucleus(probabilities, 0.7))
    _assert_distribution(_frequencies(logits, top_k=8, top_p=0.7), expected)


@pytest.mark.parametrize("top_p", [0.5, 0.95])
def test_a_flat_distribution_needs_more_than_the_first_candidates(top_p: float) -> None:
    logits = _logits(vocab=3000, spread=0.01)
    probabilities = logits.double().softmax(0)
    kept = _nucleus(probabilities, top_p)
    rows = [_row(seed=seed, top_p=top_p) for seed in range(300)]
    chosen = torch.tensor([t.token_id for t in sample(logits.expand(300, -1), rows)])
    assert kept[chosen].all()
    assert len(chosen.unique()) > 200, "drawn from all of the nucleus, not from its head"


@pytest.mark.parametrize("others", [{}, {"top_p": 0.95}])
def test_min_p(others: dict[str, float]) -> None:
    logits = _logits()
    probabilities = logits.double().softmax(0)
    if others:
        probabilities = _only(probabilities, _nucleus(probabilities, others["top_p"]))
    expected = _only(probabilities, probabilities >= 0.2 * probabilities.max())
    _assert_distribution(_frequencies(logits, min_p=0.2, **others), expected)


@pytest.mark.parametrize("vocab", [256, 1000, 5121])
@pytest.mark.parametrize("params", [{}, {"min_p": 0.1}, {"top_p": 0.97}, {"top_k": 700}])
def test_draws_fall_where_their_uniforms_do(vocab: int, params: dict[str, Any]) -> None:
    logits = _logits(vocab=vocab)
    probabilities = logits.double().softmax(0).numpy()
    order = np.arange(vocab)
    if "min_p" in params:
        probabilities[probabilities < params["min_p"] * probabilities.max()] = 0.0
    else:
        is_ranked = "top_p" in params or params.get("top_k", vocab) < vocab
        order = np.argsort(-probabilities, kind="stable") if is_ranked else order
        best_first = probabilities[order]
        cut = best_first.cumsum() - best_first >= params.get("top_p", 1.1)
        cut[params.get("top_k", vocab) :] = True
        probabilities[order[cut]] = 0.0
    reached = (probabilities[order] / probabilities.sum()).cumsum()
    rows = [_row(seed=seed, **params) for seed in range(200)]
    for seed, token in enumerate(sample(logits.expand(200, -1), rows)):
        (place,) = np.flatnonzero(order == token.token_id)
        assert probabilities[token.token_id] > 0.0
        # Weights are float32: a uniform that falls on an edge may go either way.
        below = reached[place - 1] if place else 0.0
        assert below - 1e-5 <= uniform(seed, 0) <= reached[place] + 1e-5


def test_greedy_takes_the_best() -> None:
    logits = torch.stack([_logits(seed) for seed in range(5)])
    rows = [_row(temperature=0.0)] * 5
    assert [t.token_id for t in sample(logits, rows)] == logits.argmax(-1).tolist()


def test_a_row_is_the_same_in_any_batch() -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 3},
        {"top_p": 0.9},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"logit_bias": {3: 5.0}},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    ]
    rows = [_row((4, 4, 9), seed=11 + i, **one) for i, one in enumerate(params)]
    logits = torch.stack([_logits(seed) for seed in range(len(rows))])
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_a_row_is_the_same_to_the_last_bit_among_rows_of_a_large_vocabulary() -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 0.7, "logprobs": 0},
        {"top_k": 900, "logprobs": 20},
        {"top_p": 0.999, "logprobs": 2},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "logprobs": 1},
        {"min_p": 0.01, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 3},
    ]
    # Odd, so that rows begin at addresses of all kinds.
    logits = torch.stack([_logits(seed, vocab=5121) for seed in range(len(params))])
    for seed in range(20):
        rows = [_row((4, 4, 9), seed=seed, **one) for one in params]
        together = sample(logits, rows)
        alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        assert together == alone == sample(logits.flip(0), rows[::-1])[::-1]


_KINDS: list[dict[str, Any]] = [
    {},
    {"min_p": 0.02},
    {"top_k": 300},
    {"top_p": 0.95},
    {"top_k": 400, "top_p": 0.9, "min_p": 0.005},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
]


@pytest.mark.parametrize("params", _KINDS)
def test_draws_pass_a_chi_square_test(params: dict[str, Any]) -> None:
    draws, vocab = 4000, 900
    logits = _logits(seed=5, vocab=vocab, spread=1.5)
    expected = _expected(logits, params)
    rows = [_row((4, 4, 9), (9, 2), seed=seed, **params) for seed in range(draws)]
    chosen = [token.token_id for token in sample(logits.expand(draws, -1), rows)]
    found = np.bincount(chosen, minlength=vocab)
    assert found[expected == 0].sum() == 0
    # Neighbouring ids together, so that each cell has at least 20 draws to expect.
    cells = (draws * expected).cumsum() // 20
    bounds = np.flatnonzero(np.diff(cells, prepend=-1))
    of_cells = draws * np.add.reduceat(expected, bounds)
    chi_square = ((np.add.reduceat(found, bounds) - of_cells) ** 2 / of_cells).sum()
    freedom = len(bounds) - 1
    # Mean and variance of the distribution are n and 2 n: above this once in about a million.
    assert freedom > 10
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def _expected(logits: torch.Tensor, params: dict[str, Any]) -> np.ndarray:
    """The distribution that `params` ask for after a prompt 9, 2 and an answer 4, 4, 9."""
    scores = logits.double().numpy().copy()
    for token in (2, 4, 9):
        penalty = params.get("repetition_penalty", 1.0)
        scores[token] *= 1 / penalty if scores[token] > 0 else penalty
    for token, count in ((4, 2), (9, 1)):
        scores[token] -= count * params.get("frequency_penalty", 0.0)
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order] - scores.max())
    weights[params.get("top_k", len(scores)) :] = 0.0
    weights /= weights.sum()
    weights[weights.cumsum() - weights >= params.get("top_p", 1.1)] = 0.0
    weights[weights < params.get("min_p", 0.0) * weights[0]] = 0.0
    out = np.zeros(len(scores))
    out[order] = weights / weights.sum()
    return out


def test_a_row_is_the_same_whoever_of_a_crew_computes_it() -> None:
    rows = [_row((4, 4, 9), seed=n, logprobs=n, **params) for n, params in enumerate(4 * _KINDS)]
    logits = torch.stack([_logits(seed, vocab=4096) for seed in range(len(rows))])
    with closing(Crew(3)) as crew:
        sampler = Sampler(crew)
        for _ in range(20):
            assert sampler.sample(logits, rows) == sample(logits, rows)


def test_rows_say_which_logits_are_theirs() -> None:
    logits = torch.stack([_logits(seed) for seed in range(4)])
    params: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 3}, {"top_k": 5, "logprobs": 2}]
    rows = [_row(**one) for one in params]
    assert sample(logits, rows, [3, 0, 3]) == sample(logits[[3, 0, 3]], rows)
    greedy = [_row(temperature=0.0)] * 3
    told = [token.token_id for token in sample(logits, greedy, [2, 2, 1])]
    assert told == logits[[2, 2, 1]].argmax(-1).tolist()


@pytest.mark.parametrize("params", [{"top_p": 0.5}, {"top_k": 7}, {"top_k": 3, "top_p": 0.9}])
@pytest.mark.parametrize("levels", [1, 2, 100])
def test_equal_logits_are_ordered_by_their_ids_in_any_batch(
    params: dict[str, Any], levels: int
) -> None:
    logits = torch.arange(3 * 2000).view(3, -1) * 7919 % 6007 // 61 % levels / 10.0
    rows = [_row(seed=seed, **each) for seed, each in enumerate([params, {"top_k": 1}, params])]
    together = sample(logits, rows)
    for index, row in enumerate(rows):
        assert sample(logits[index : index + 1], [row]) == together[index : index + 1]
    assert together[1].token_id == int(logits[1].argmax())


def test_the_chosen_tokens_logprob_alone_may_be_asked_for() -> None:
    (token,) = sample(_logits()[None], [_row(logprobs=0)])
    assert token.logprobs is not None
    assert token.logprobs.top == ()


def test_the_most_likely_of_equal_ones_are_the_first() -> None:
    logits = torch.zeros(1, 2000)
    logits[0, [1500, 300, 700]] = 1.0
    row = _row(logprobs=5)
    (token,) = sample(logits, [row])
    assert token.logprobs is not None
    assert [token_id for token_id, _ in token.logprobs.top] == [300, 700, 1500, 0, 1]


def test_a_seed_gives_the_same_and_positions_differ() -> None:
    logits = _logits().expand(64, -1)
    by_position = [_row(tuple([5] * length), seed=3) for length in range(64)]
    first = sample(logits, by_position)
    assert first == sample(logits, by_position)
    assert len({token.token_id for token in first}) > 5


def test_logits_are_left_unchanged() -> None:
    logits = _logits()[None].clone()
    before = logits.clone()
    sample(logits, [_row((2,), banned=(1,), logit_bias={3: 1.0}, repetition_penalty=2.0)])
    assert torch.equal(logits, before)


def test_banned_tokens_are_never_chosen() -> None:
    logits = _logits()
    best = int(logits.argmax())
    assert sample(logits[None], [_row(temperature=0.0, banned=(best,))])[0].token_id != best
    assert _frequencies(logits, banned=(best,))[best] == 0


def test_logit_bias() -> None:
    logits = _logits()
    biased = logits.clone()
    biased[7] += 3.0
    found = _frequencies(logits, logit_bias={7: 3.0})
    _assert_distribution(found, biased.double().softmax(0))
    assert sample(logits[None], [_row(temperature=0.0, logit_bias={9: 100.0})])[0].token_id == 9


def test_penalties_by_their_formulas() -> None:
    logits = torch.tensor([2.0, -1.0, 1.5, 0.5, 1.9, -2.0])
    prompt, output = (0, 1), (2, 2, 2, 4)

    def probabilities(**params: float) -> torch.Tensor:
        return _frequencies(logits, prompt=prompt, output=output, **params)

    repeated = torch.tensor([2.0 / 1.5, -1.0 * 1.5, 1.5 / 1.5, 0.5, 1.9 / 1.5, -2.0])
    _assert_distribution(probabilities(repetition_penalty=1.5), repeated.double().softmax(0))
    present = torch.tensor([2.0, -1.0, 1.5 - 0.7, 0.5, 1.9 - 0.7, -2.0])
    _assert_distribution(probabilities(presence_penalty=0.7), present.double().softmax(0))
    frequent = torch.tensor([2.0, -1.0, 1.5 - 3 * 0.4, 0.5, 1.9 - 0.4, -2.0])
    _assert_distribution(probabilities(frequency_penalty=0.4), frequent.double().softmax(0))


def test_logprobs_are_the_models_own() -> None:
    logits = torch.stack([_logits(1), _logits(2), _logits(3)])
    rows = [
        _row(temperature=0.0, logprobs=3, logit_bias={5: 100.0}),
        _row(temperature=0.0),
        _row(temperature=0.0, logprobs=0),
    ]
    first, second, third = sample(logits, rows)
    expected = logits[0].log_softmax(0)
    assert first.logprobs is not None
    assert first.token_id == first.logprobs.token_id == 5
    assert first.logprobs.logprob == pytest.approx(float(expected[5]))
    best = expected.topk(3)
    assert [token for token, _ in first.logprobs.top] == best.indices.tolist()
    assert [value for _, value in first.logprobs.top] == pytest.approx(best.values.tolist())
    assert second == OutputToken(int(logits[1].argmax()))
    assert third.logprobs is not None
    assert third.logprobs.top == ()


def test_a_tiny_temperature_is_greedy_and_a_huge_one_flat() -> None:
    logits = _logits()
    best = int(logits.argmax())
    assert sample(logits[None], [_row(temperature=1e-30)])[0].token_id == best
    assert sample(logits[None], [_row(temperature=1e-4)])[0].token_id == best
    flat = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)
    _assert_distribution(_frequencies(0.01 * logits, temperature=100.0), flat)


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    numbers = np.array([[uniform(seed, n) for n in range(100)] for seed in range(100)])
    assert (0 <= numbers).all() and (numbers < 1).all()  # noqa: PT018, SIM300
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    # Chi-square of 19 degrees of freedom: above 50 happens once in 10,000.
    assert ((counts - 500) ** 2 / 500).sum() < 50
    for shifted in (np.roll(numbers, 1, axis=0), np.roll(numbers, 1, axis=1)):
        assert abs(np.corrcoef(numbers.ravel(), shifted.ravel())[0, 1]) < 0.05
    assert 0 <= uniform(2**64 - 1, 10**6) < 1


def test_rows_and_logits_must_match() -> None:
    with pytest.raises(AssertionError):
        sample(_logits()[None], [_row(), _row()._replace(banned=(1,))])


def test_a_mask_acts_before_everything_that_chooses_and_on_its_row_alone() -> None:
    logits = torch.stack([_logits(seed) for seed in range(4)])
    bits = np.zeros(VOCAB, dtype=bool)
    bits[[3, VOCAB - 1]] = True
    mask = np.packbits(bits, bitorder="little")
    best = 3 if logits[0, 3] > logits[0, VOCAB - 1] else VOCAB - 1
    rows = [
        _row(temperature=0.0)._replace(allowed=mask),
        # One of two is kept by top-k of one; the ban is the mask's business.
        _row(banned=(3, VOCAB - 1), top_k=1, seed=5)._replace(allowed=mask),
        _row(logit_bias={3: -100.0, 7: 100.0}, top_p=0.5, seed=6)._replace(allowed=mask),
        _row(temperature=0.0),
    ]
    told = [token.token_id for token in sample(logits, rows)]
    assert told[0] == best
    assert told[1] == (3 if logits[1, 3] > logits[1, VOCAB - 1] else VOCAB - 1)
    assert told[2:] == [VOCAB - 1, int(logits[3].argmax())]


def test_a_masked_choice_is_distributed_as_what_is_left() -> None:
    logits = _logits(11)
    bits = np.zeros(VOCAB, dtype=bool)
    bits[[2, 9, 30]] = True
    mask = np.packbits(bits, bitorder="little")
    rows = [_row(seed=seed)._replace(allowed=mask) for seed in range(DRAWS)]
    told = sample(logits.expand(DRAWS, -1), rows)
    counts = np.bincount([token.token_id for token in told], minlength=VOCAB) / DRAWS
    expected = torch.where(torch.from_numpy(bits), logits, -torch.inf).softmax(-1).numpy()
    assert counts == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize("vocab", [VOCAB, 64, 3000, 4096])
@pytest.mark.parametrize("levels", [1, 5, 10**6])
def test_the_best_of_what_is_allowed(vocab: int, levels: int) -> None:
    rng = np.random.default_rng(vocab + levels)
    logits = (rng.integers(-levels, levels, (12, vocab)) / 7).astype(np.float32)
    allowed = rng.random((12, vocab)) < rng.choice([0.01, 0.5, 0.99], (12, 1))
    allowed[:, vocab - 1] = True
    logits[3, allowed[3]] = -np.inf
    logits[4, ::2] = np.nan
    rows = [
        _row(temperature=0.0)._replace(allowed=np.packbits(bits, bitorder="little"))
        for bits in allowed
    ]
    told = [token.token_id for token in sample(torch.from_numpy(logits), rows)]
    # Of equal ones the first; what is no number is the best of none.
    expected = np.where(allowed, np.nan_to_num(logits, nan=-np.inf, neginf=-1e30), -np.inf)
    for row, (token, scores) in enumerate(zip(told, expected, strict=True)):
        if row != 4 or scores.max() > -np.inf:
            assert token == scores.argmax(), row
        assert allowed[row, token]
