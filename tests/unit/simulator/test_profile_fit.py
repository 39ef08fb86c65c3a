"""A profile of a machine whose terms are known gives these terms."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from bench.profile_samples import AnswerSample, Profile, PromptSample
from kvferry.errors import InvalidInput
from simulator.profile_fit import fit_timing
from simulator.step_times import StepTimes

TRUE = StepTimes(
    prompt_step_s=0.02,
    prompt_token_s=0.002,
    prompt_context_s=2e-7,
    decode_step_s=0.05,
    sequence_s=0.008,
    context_token_s=1e-5,
    transfer_s=0.006,
    bytes_per_s=1e9,
    kv_bytes_per_token=46_080,
    layers=30,
    request_s=0.003,
    hop_s=0.001,
    prompt_beside=0.3,
    decode_beside=0.1,
)


def prompt_sample(tokens: int, cached: int, noise: float, slower: float = 1.0) -> PromptSample:
    steps, contexts = math.ceil(tokens / 128), tokens * (cached + (tokens - 1) / 2)
    line = TRUE.prompts_s(tokens, contexts) + (steps - 1) * TRUE.prompt_step_s
    computed_s = noise * slower * line
    ttft_s = TRUE.request_s + 4 * TRUE.hop_s + computed_s
    # The first token is underway for one of the hops.
    handoff_s = TRUE.transfer_s - TRUE.hop_s
    return PromptSample(
        tokens, steps, contexts, computed_s, TRUE.request_s, ttft_s, handoff_s, 10, 460_800
    )


def answer_sample(batch: int, context: int, noise: float, slower: float = 1.0) -> AnswerSample:
    seconds = noise * slower * 20 * TRUE.decode_s(batch, batch * context)
    return AnswerSample(20, 20 * batch, 20.0 * batch * context, seconds)


def measured(noise: float) -> Profile:
    rng = random.Random(1)

    def draw() -> float:
        return rng.gauss(1.0, noise)

    shapes = [(n, c) for n in (24, 96, 128, 200, 384, 768, 1400) for c in (0, n)]
    return Profile(
        prompts=[prompt_sample(n, c, draw()) for n, c in 3 * shapes],
        answers=[answer_sample(b, c, draw()) for b in (1, 2, 4, 8) for c in (64, 512)],
        prompts_beside=[prompt_sample(384, 0, draw(), 1.3) for _ in range(9)],
        answers_beside=[answer_sample(2, 96, draw(), 1.1) for _ in range(2)],
        others=1,
        link_bytes_per_s=1e9,
    )


def test_exact_measurements_give_all_terms():
    times = fit_timing(measured(0.0), 30, 0.01, {}).times
    for name in StepTimes.__slots__:
        assert getattr(times, name) == pytest.approx(getattr(TRUE, name), rel=1e-5), name


def test_noisy_measurements_give_nearly_the_same_times():
    timing = fit_timing(measured(0.05), 30, 0.15, {"model": "known"})
    times = timing.times
    for tokens in (50, 300, 1000):
        contexts = tokens * tokens / 2
        near = pytest.approx(TRUE.prompts_s(tokens, contexts), rel=0.06)
        assert times.prompts_s(tokens, contexts) == near
    assert times.decode_s(6, 1200) == pytest.approx(TRUE.decode_s(6, 1200), rel=0.06)
    assert timing.about["model"] == "known"
    assert timing.about["residuals"]["prompts"]["samples"] == 42


def test_alone_on_its_host_nothing_is_slower():
    times = fit_timing(replace(measured(0.0), others=0), 30, 0.1, {}).times
    assert (times.prompt_beside, times.decode_beside) == (0.0, 0.0)


def test_a_machine_too_busy_to_be_measured_is_refused():
    with pytest.raises(InvalidInput, match="prompts: half of the measurements"):
        fit_timing(measured(0.3), 30, 0.05, {})


def test_links_that_were_never_busy_are_assumed_and_said_to_be():
    timing = fit_timing(replace(measured(0.0), link_bytes_per_s=0.0), 30, 0.1, {})
    assert timing.times.bytes_per_s == 1e9
    assert timing.about["bytes_per_s"].startswith("assumed")
    assert fit_timing(measured(0.0), 30, 0.1, {}).about["bytes_per_s"] == "measured"
