"""From what a profile measured to a timing model."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

from simulator.fit import fit_line
from simulator.step_times import StepTimes
from simulator.timing import TimingKind, WorkerTiming

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.profile_samples import AnswerSample, Profile, PromptSample

_HOPS_TO_FIRST_TOKEN = 4
"""With a handoff: to the decode worker, to the prefill worker, and the same way back."""
_HOPS_ALONE = 2
_LINK_BYTES_PER_S = 1e9
"""As routers assume (`router.policy`) of links that were never so busy that their rate showed."""


def fit_timing(
    profile: Profile, layers: int, error_max: float, about: Mapping[str, Any]
) -> WorkerTiming:
    """All terms that the profile tells; the rest is as by default.

    Raises `InvalidInput`, naming what, if half of the measurements of something are further than
    `error_max` (a share) from what the terms say.
    """
    prompts = fit_line(
        "prompts",
        ("prompt_step_s", "prompt_token_s", "prompt_context_s"),
        [(each.steps, each.tokens, each.token_contexts) for each in profile.prompts],
        [each.computed_s for each in profile.prompts],
        error_max,
    )
    answers = fit_line(
        "answers",
        ("decode_step_s", "sequence_s", "context_token_s"),
        [(each.steps, each.sequences, each.context_tokens) for each in profile.answers],
        [each.seconds for each in profile.answers],
        error_max,
    )
    times = StepTimes(
        layers=layers,
        prompt_step_s=prompts.terms["prompt_step_s"],
        prompt_token_s=prompts.terms["prompt_token_s"],
        prompt_context_s=prompts.terms["prompt_context_s"],
        decode_step_s=answers.terms["decode_step_s"],
        sequence_s=answers.terms["sequence_s"],
        context_token_s=answers.terms["context_token_s"],
    )
    times = _with_messages(times, profile.prompts)
    times = _with_transfers(times, profile)
    times = _with_neighbours(times, profile)
    residuals = {"prompts": prompts.about(), "answers": answers.about()}
    link = "measured" if profile.link_bytes_per_s else "assumed: no link was busy"
    told = {**about, "bytes_per_s": link, "residuals": residuals}
    return WorkerTiming(times, TimingKind.MEASURED, told)


def _with_messages(times: StepTimes, prompts: Sequence[PromptSample]) -> StepTimes:
    """What is neither computed nor before the choice of workers are messages."""
    request_s = statistics.median(each.before_s for each in prompts)
    rest = [
        max(0.0, each.ttft_s - each.before_s - each.computed_s)
        / (_HOPS_TO_FIRST_TOKEN if each.moved_tokens else _HOPS_ALONE)
        for each in prompts
    ]
    return dataclasses.replace(times, request_s=request_s, hop_s=statistics.median(rest))


def _with_transfers(times: StepTimes, profile: Profile) -> StepTimes:
    moved = [each for each in profile.prompts if each.moved_tokens]
    if not moved:
        return times
    per_token = round(statistics.median(each.moved_bytes / each.moved_tokens for each in moved))
    # In the simulator the first token's two hops pass meanwhile.
    late = statistics.median(each.handoff_s for each in moved)
    return dataclasses.replace(
        times,
        kv_bytes_per_token=per_token,
        bytes_per_s=profile.link_bytes_per_s or _LINK_BYTES_PER_S,
        transfer_s=late + times.hop_s,
    )


def _with_neighbours(times: StepTimes, profile: Profile) -> StepTimes:
    """How much longer steps take, a share for each other worker that computes."""
    if not profile.others:
        return times
    prompts = [
        each.computed_s / _prompt_alone_s(times, each) - 1.0 for each in profile.prompts_beside
    ]
    answers = [
        each.seconds / _answers_alone_s(times, each) - 1.0 for each in profile.answers_beside
    ]
    return dataclasses.replace(
        times,
        prompt_beside=max(0.0, statistics.median(prompts)) / profile.others,
        decode_beside=max(0.0, statistics.median(answers)) / profile.others,
    )


def _prompt_alone_s(times: StepTimes, sample: PromptSample) -> float:
    steps = (sample.steps - 1) * times.prompt_step_s
    return steps + times.prompts_s(sample.tokens, sample.token_contexts)


def _answers_alone_s(times: StepTimes, sample: AnswerSample) -> float:
    return (
        sample.steps * times.decode_step_s
        + sample.sequences * times.sequence_s
        + sample.context_tokens * times.context_token_s
    )
