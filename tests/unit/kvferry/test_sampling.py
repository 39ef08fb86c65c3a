from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kvferry.errors import ErrorKind, InvalidInput
from kvferry.limits import (
    LOGIT_BIAS_ENTRIES_MAX,
    LOGPROBS_MAX,
    SAMPLES_MAX,
    STOP_STRING_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
)
from kvferry.sampling import SamplingParams

VOCABULARY = 100


def test_defaults_are_valid_and_change_nothing():
    params = SamplingParams()
    params.validate(VOCABULARY)
    assert (params.temperature, params.top_p, params.repetition_penalty) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("top_k", 2**31 - 1),
        ("top_p", 1e-6),
        ("min_p", 1.0),
        ("presence_penalty", -2.0),
        ("seed", 2**64 - 1),
        ("logprobs", LOGPROBS_MAX),
        ("n", SAMPLES_MAX),
        ("stop", ("x" * STOP_STRING_CHARACTERS_MAX,) * STOP_STRINGS_MAX),
        ("stop_token_ids", (VOCABULARY - 1,) * STOP_TOKEN_IDS_MAX),
        ("logit_bias", {0: -100.0}),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", float(np.float32(0.01))),
    ],
)
def test_the_ends_of_each_range_are_allowed(field, value):
    dataclasses.replace(SamplingParams(), **{field: value}).validate(VOCABULARY)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("temperature", -0.1, "sampling.temperature"),
        ("temperature", math.nan, "sampling.temperature"),
        ("temperature", math.inf, "sampling.temperature"),
        ("top_k", -1, "sampling.top_k"),
        ("top_p", 0.0, "sampling.top_p"),
        ("top_p", 2.0, "sampling.top_p"),
        ("min_p", 1.1, "sampling.min_p"),
        ("repetition_penalty", 0.0, "sampling.repetition_penalty"),
        ("presence_penalty", 2.1, "sampling.presence_penalty"),
        ("frequency_penalty", -2.1, "sampling.frequency_penalty"),
        ("seed", -1, "sampling.seed"),
        ("max_tokens", 0, "sampling.max_tokens"),
        ("min_tokens", 129, "sampling.min_tokens"),
        ("logprobs", LOGPROBS_MAX + 1, "sampling.logprobs"),
        ("n", 0, "sampling.n"),
        ("n", SAMPLES_MAX + 1, "sampling.n"),
        ("stop", ("a",) * 10_000, "sampling.stop"),
        ("stop", ("a", ""), "sampling.stop[1]"),
        ("stop", ("x" * (STOP_STRING_CHARACTERS_MAX + 1),), "sampling.stop[0]"),
        ("stop_token_ids", (0,) * (STOP_TOKEN_IDS_MAX + 1), "sampling.stop_token_ids"),
        ("stop_token_ids", (1, VOCABULARY), "sampling.stop_token_ids[1]"),
        ("logit_bias", {VOCABULARY: 1.0}, "sampling.logit_bias (token id)"),
        ("logit_bias", {3: 101.0}, "sampling.logit_bias[3]"),
        ("logit_bias", {3: math.nan}, "sampling.logit_bias[3]"),
        (
            "logit_bias",
            dict.fromkeys(range(LOGIT_BIAS_ENTRIES_MAX + 1), 0.0),
            "sampling.logit_bias",
        ),
    ],
)
def test_what_is_out_of_range_is_named(field, value, named):
    params = dataclasses.replace(SamplingParams(), **{field: value})
    with pytest.raises(InvalidInput) as refused:
        params.validate(VOCABULARY)
    assert refused.value.field == named
    assert refused.value.kind is ErrorKind.INVALID_INPUT


def test_the_first_sample_is_what_a_single_answer_would_be():
    params = SamplingParams(temperature=0.5, seed=7, n=3)
    assert params.of_sample(0) == SamplingParams(temperature=0.5, seed=7)


def test_seeds_of_samples_follow_the_documented_formula():
    last = 2**64 - 1
    params = SamplingParams(seed=last, n=SAMPLES_MAX)
    seeds = [params.of_sample(index).seed for index in range(SAMPLES_MAX)]
    assert seeds[:3] == [last, 0x9E3779B97F4A7C14, 0x3C6EF372FE94F829]
    assert len(set(seeds)) == SAMPLES_MAX
    for index in range(SAMPLES_MAX):
        params.of_sample(index).validate(VOCABULARY)


@pytest.mark.parametrize("index", [-1, 3])
def test_there_is_no_other_sample(index):
    with pytest.raises(AssertionError, match="of 3"):
        SamplingParams(n=3).of_sample(index)
