"""Answers that are cut off at any token and go on at another worker, seen by a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.config import SchedulerConfig
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.cutting_client import Cuts
from tests.support.digest_cluster import digest_cluster, digest_config
from tests.support.failover_load import Said, said
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.in_process_cluster import InProcessCluster

PROMPT = list(range(20, 61))
LENGTH = 8
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 3.0, "seed": 7, "logprobs": 0},
    "penalties": {
        "temperature": 2.0,
        "seed": 8,
        "top_p": 0.97,
        "frequency_penalty": 1.5,
        "presence_penalty": 1.0,
        "repetition_penalty": 1.5,
    },
    "min tokens": {
        "temperature": 3.0,
        "seed": 9,
        "min_tokens": 6,
        "stop_token_ids": list(range(0, 211, 2)),
    },
    "samples": {"temperature": 3.0, "seed": 2, "n": 3, "stop_token_ids": list(range(40))},
}


@dataclass(slots=True)
class _Arena:
    cluster: InProcessCluster
    cuts: Cuts

    def ask(self, cuts: Sequence[int] = (), **sampling: Any) -> tuple[list[Said], Any]:
        """What each sample said, and the figures of all."""
        self.cuts.after.extend(cuts)
        request = inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=PROMPT),
            sampling=inference.SamplingParams(
                **{"max_tokens": LENGTH, "ignore_eos": True} | sampling
            ),
        )
        responses = list(self.cluster.stub.Generate(request, timeout=60))
        assert not self.cuts.after, "not every cut was made"
        assert responses[-1].HasField("finish")
        count = sampling.get("n", 1)
        return [said(responses, index) for index in range(count)], responses[-1].finish.usage


HANDOFF, LOCAL = "handoff", "local"
"""Who computes prompts: a prefill worker, or the decode worker itself."""


@pytest.fixture(scope="module", params=[HANDOFF])
def arena(request: pytest.FixtureRequest) -> Iterator[_Arena]:
    cuts = Cuts()
    prefill = [Role.PREFILL] if request.param == HANDOFF else []
    roles = [*prefill, Role.DECODE, Role.DECODE]
    config = digest_config(8, 512, scheduler=SchedulerConfig(chunk_tokens=16))
    with digest_cluster(config, roles, cuts.connect) as cluster:
        yield _Arena(cluster, cuts)
        cluster.wait_idle()


@pytest.mark.parametrize(
    ("arena", "kind"),
    [(HANDOFF, kind) for kind in KINDS] + [(LOCAL, "samples")],
    indirect=["arena"],
)
def test_cut_at_any_token_nobody_can_tell(arena: _Arena, kind: str) -> None:
    whole, figures = arena.ask(**KINDS[kind])
    total = sum(len(sample.token_ids) for sample in whole)
    assert (figures.completion_tokens, figures.attempt) == (total, 1)
    for cut in range(total + 1):
        again, counted = arena.ask([cut], **KINDS[kind])
        assert again == whole, cut
        assert counted.prompt_tokens == len(PROMPT)
        assert counted.completion_tokens == total
        assert counted.attempt == 2


@pytest.mark.parametrize("kind", KINDS)
def test_cut_again_and_again(arena: _Arena, kind: str) -> None:
    whole, _ = arena.ask(**KINDS[kind])
    again, counted = arena.ask([1, 2, 0, 0, 1, 0, 2], **KINDS[kind])
    assert again == whole
    assert counted.attempt == 8
    assert counted.completion_tokens == sum(len(sample.token_ids) for sample in whole)


@pytest.mark.parametrize("n", [1, 2])
def test_stop_strings_reach_across_the_seam(arena: _Arena, n: int) -> None:
    options = {"temperature": 3.0, "seed": 13, "n": n}
    free, _ = arena.ask(**options)
    # From the end of one token to the beginning of another, a few tokens further on.
    stop = free[0].text[3:7]
    assert stop
    whole, figures = arena.ask(stop=[stop], **options)
    assert whole[0].stop_string == stop
    for cut in range(2, figures.completion_tokens, 2 if n > 1 else 1):
        again, counted = arena.ask([cut], stop=[stop], **options)
        assert again == whole, cut
        assert counted.completion_tokens == figures.completion_tokens


def test_a_resumed_attempt_can_be_cancelled(arena: _Arena) -> None:
    seen = len(arena.cuts.requests)
    arena.cuts.after.append(3)
    request = inference.GenerateRequest(
        request_id="endless",
        token_ids=inference.TokenIds(ids=PROMPT),
        sampling=inference.SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True),
    )
    call = arena.cluster.stub.Generate(request, timeout=60)
    got = 0
    for response in call:
        got += len(response.token_ids)
        if got > 5:
            break
    call.cancel()
    first, second = arena.cuts.requests[seen:]
    assert first.resumed == ()
    assert len(second.resumed[0].token_ids) == 3
    wait_until("its end", lambda: arena.cluster.router.requests_in_flight == 0)
    arena.cluster.wait_idle()


def test_what_was_told_is_computed_by_the_prefill_worker(arena: _Arena) -> None:
    prompt = [number % 190 + 10 for number in range(3, 400, 7)]
    arena.cuts.after.append(7)
    answer = arena.cluster.generate(prompt, 12)
    assert answer.finish.usage.attempt == 2
    assert answer.finish.usage.prefill_worker == "prefill-0"
    # The prompt and six of the seven tokens; the seventh begins the next step.
    moved = answer.finish.usage.moved_tokens + answer.finish.usage.decode_hit_tokens
    assert moved == len(prompt) + 6
