"""Several answers to one prompt, with the real model: those of single requests, for one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from kvferry.config import load_config
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.sampling import SamplingParams
from tests.support.in_process_cluster import Answer, InProcessCluster
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from kvferry.config import ClusterConfig
    from tests.support.prompts import Prompt

PD = (Role.PREFILL, Role.DECODE)
AGGREGATED = (Role.BOTH,)
N = 4
ANSWER_TOKENS = 6
PROMPTS = ("length-16", "length-33", "length-100")
DRAWN = {"temperature": 0.9, "top_p": 0.95, "seed": 2**63 + 5}


@dataclass(frozen=True, slots=True)
class Case:
    """One way of asking for the same samples."""

    roles: tuple[Role, ...]
    page_size: int
    radix: bool = True
    local_max: int = 0
    """Prompts up to this are computed by the decode worker itself."""

    def __str__(self) -> str:
        shape = "pd" if self.roles == PD else "aggregated"
        local = "-local" if self.local_max else ""
        return f"{shape}{local}-page{self.page_size}-{'radix' if self.radix else 'no-radix'}"

    def config(self) -> ClusterConfig:
        overrides = {
            "cache.page_size": str(self.page_size),
            "cache.radix": str(self.radix),
            "cache.audit": "true",
            "handoff.local_prefill_tokens_max": str(self.local_max),
        }
        if self.roles == AGGREGATED:
            overrides |= {"workers.both.count": "1", "workers.prefill.count": "0"}
            overrides |= {"workers.decode.count": "0"}
        return load_config(None, {}, overrides)


SAMPLE = (Case(PD, 16), Case(AGGREGATED, 1, radix=False))
REST = tuple(
    case
    for case in (
        *(
            Case(roles, page_size, radix)
            for roles in (PD, AGGREGATED)
            for page_size in (1, 16, 64)
            for radix in (True, False)
        ),
        Case(PD, 16, local_max=1000),
    )
    if case not in SAMPLE
)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=str(case)) for case in SAMPLE),
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in REST),
    ],
)
def test_samples_are_single_answers_for_one_prefill_and_one_transfer(
    case: Case, prompts: list[Prompt]
) -> None:
    chosen = [prompt for prompt in prompts if prompt.name in PROMPTS]
    is_moved = case.roles == PD and case.local_max == 0
    with InProcessCluster(case.config(), case.roles) as cluster:
        greedy = [cluster.generate_samples(prompt.ids, N, ANSWER_TOKENS) for prompt in chosen]
        counters = cluster.counters()
        drawn = [
            cluster.generate_samples(prompt.ids, N, ANSWER_TOKENS, **DRAWN) for prompt in chosen
        ]
        single = [cluster.generate(prompt.ids, ANSWER_TOKENS) for prompt in chosen]
        params = SamplingParams(n=N, seed=DRAWN["seed"])
        seeded = [
            [
                cluster.generate(prompt.ids, ANSWER_TOKENS, **DRAWN | {"seed": sample.seed})
                for sample in map(params.of_sample, range(N))
            ]
            for prompt in chosen
        ]
        cluster.wait_idle()

    handoffs = len(chosen) if is_moved else 0
    assert counters["source_closed"] == counters["sink_adopted"] == handoffs
    assert (counters["samples_forked"], counters["samples_queued"]) == ((N - 1) * len(chosen), 0)
    for prompt, answers, alone in zip(chosen, greedy, single, strict=True):
        _check_usage(prompt, answers, moved_tokens=len(prompt.ids) if is_moved else 0)
        assert [(one.token_ids, one.text) for one in answers] == N * [(alone.token_ids, alone.text)]
    for answers, singles in zip(drawn, seeded, strict=True):
        assert [one.token_ids for one in answers] == [one.token_ids for one in singles]
        assert [one.text for one in answers] == [one.text for one in singles]
    assert max(len({one.token_ids for one in answers}) for answers in drawn) == N


def _check_usage(prompt: Prompt, answers: list[Answer], moved_tokens: int) -> None:
    """Told once, and what it tells is of one prompt and of all answers."""
    told = [one.finish.usage for one in answers if one.finish.HasField("usage")]
    assert len(told) == 1
    assert told[0].prompt_tokens == len(prompt.ids)
    assert told[0].completion_tokens == N * ANSWER_TOKENS
    assert told[0].moved_tokens == moved_tokens
    assert told[0].prefill_hit_tokens == told[0].decode_hit_tokens == 0


@pytest.mark.parametrize("how", ["disconnect", "cancel-call"])
def test_cancelling_ends_all_samples(how: str, prompts: list[Prompt]) -> None:
    with InProcessCluster(Case(PD, 16).config(), PD) as cluster:
        request = inference.GenerateRequest(
            request_id="r",
            token_ids=inference.TokenIds(ids=prompts[-1].ids),
            sampling=inference.SamplingParams(max_tokens=400, n=N, ignore_eos=True, seed=1),
        )
        stream = cluster.stub.Generate(request, timeout=120)
        decode = cluster.workers[1]
        wait_until("samples decode", lambda: decode.snapshot().load.running == N)
        if how == "disconnect":
            stream.cancel()
        else:
            assert cluster.stub.Cancel(inference.CancelRequest(request_id="r"), timeout=60).found
            ends = {r.index: r.finish for r in stream if r.HasField("finish")}
            assert sorted(ends) == list(range(N))
            assert {end.reason for end in ends.values()} == {inference.FINISH_REASON_CANCELLED}
            assert sum(end.HasField("usage") for end in ends.values()) == 1
        cluster.wait_idle()
