"""Whatever validates can be sampled: a token of the model, which depends on its row alone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampler import Sampler, SamplingRow
from kvferry.sampling import SamplingParams

VOCAB = 40
sample = Sampler().sample

_FLOAT32 = st.floats(width=32, allow_nan=False)


def _between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.one_of(st.floats(low, high), st.sampled_from([low, high]))


@st.composite
def _params(draw: st.DrawFn) -> SamplingParams:
    params = SamplingParams(
        temperature=draw(_between(0.0, 100.0)),
        top_k=draw(st.integers(0, 2 * VOCAB)),
        top_p=draw(_between(1e-300, 1.0)),
        min_p=draw(_between(0.0, 1.0)),
        repetition_penalty=draw(_between(0.01, 100.0)),
        presence_penalty=draw(_between(-2.0, 2.0)),
        frequency_penalty=draw(_between(-2.0, 2.0)),
        logit_bias=draw(
            st.dictionaries(st.integers(0, VOCAB - 1), _between(-100.0, 100.0), max_size=4)
        ),
        seed=draw(st.integers(0, 2**64 - 1)),
        logprobs=draw(st.none() | st.integers(0, 20)),
    )
    params.validate(VOCAB)
    return params


def _mask(allowed: set[int]) -> np.ndarray:
    bits = [number in allowed for number in range(VOCAB)]
    return np.packbits(bits, bitorder="little")


_MASKS = st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1).map(_mask)


@st.composite
def _rows(draw: st.DrawFn) -> list[SamplingRow]:
    ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)

    def row() -> SamplingRow:
        banned = tuple(draw(st.sets(st.integers(0, 5))))
        prompt, output = draw(ids), draw(ids)
        known = np.asarray(prompt + output, dtype=np.int32)
        return SamplingRow(draw(_params()), known, len(prompt), banned, draw(_MASKS))

    return [row() for _ in range(draw(st.integers(1, 4)))]


@given(st.data(), _rows())
def test_any_valid_params_and_any_finite_logits_choose_a_token(
    data: st.DataObject, rows: list[SamplingRow]
) -> None:
    size = st.floats(-1e4, 1e4, width=32)
    values = data.draw(st.lists(size, min_size=VOCAB * len(rows), max_size=VOCAB * len(rows)))
    logits = torch.tensor(values, dtype=torch.float32).view(len(rows), VOCAB)
    together = sample(logits, rows)
    for index, (row, token) in enumerate(zip(rows, together, strict=True)):
        assert 0 <= token.token_id < VOCAB
        if row.allowed is None:
            assert token.token_id not in row.banned
        else:
            assert row.allowed[token.token_id // 8] >> token.token_id % 8 & 1
        assert sample(logits[index : index + 1], [row])[0].token_id == token.token_id


@given(st.lists(_FLOAT32 | st.just(float("nan")), min_size=VOCAB, max_size=VOCAB), _params())
def test_not_even_broken_logits_leave_the_vocabulary(
    values: list[float], params: SamplingParams
) -> None:
    none = np.empty(0, dtype=np.int32)
    (token,) = sample(torch.tensor([values]), [SamplingRow(params, none, 0, ())])
    assert 0 <= token.token_id < VOCAB
