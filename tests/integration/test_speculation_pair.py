"""Drafts in whole clusters of the digest model: nobody can tell from an answer that there were."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import pytest

from engine.speculation import Drafts
from kvferry.config import SchedulerConfig
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.digest_cluster import digest_cluster, digest_config
from tests.support.digest_model import VOCAB, answer
from tests.support.draft_oracle import ALWAYS, foreseen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.request import Request
    from kvferry.ids import TokenIds
    from tests.support.in_process_cluster import Answer, InProcessCluster

MAX_TOKENS, SAMPLES = 40, 3


class _Switched:
    """Proposes nothing until it is switched on."""

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, request: Request, most: int) -> TokenIds:
        return foreseen(request, most if self.is_on else 0)


def _prompts() -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [draw.integers(10, VOCAB, length).tolist() for length in (1, 16, 33, 50, 64, 7)]


def _ask_all(cluster: InProcessCluster, stop: Sequence[str]) -> list[Answer]:
    prompts = _prompts()
    with ThreadPoolExecutor(len(prompts)) as pool:
        plain = list(pool.map(lambda ids: cluster.generate(ids, MAX_TOKENS), prompts))
        cut = list(pool.map(lambda ids: cluster.generate(ids, MAX_TOKENS, stop=stop), prompts))
    samples = cluster.generate_samples(prompts[3], SAMPLES, MAX_TOKENS)
    return [*plain, *cut, *samples]


@pytest.mark.slow
@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.BOTH,)], ids=["pair", "both"])
def test_answers_texts_and_usage_are_those_of_a_cluster_without_drafts(
    roles: tuple[Role, ...],
) -> None:
    propose = _Switched()
    # Some wait for room and some are retracted.
    config = digest_config(8, 384, scheduler=SchedulerConfig(output_reserve=0.0))

    def drafts_of(_: object) -> Drafts:
        return Drafts(propose, 3, ALWAYS)

    with (
        patch("cluster.worker_process.drafts_of", drafts_of),
        digest_cluster(config, roles) as cluster,
    ):
        stop = [cluster.generate(_prompts()[1], 20).text[-4:]]
        expected = _ask_all(cluster, stop)
        assert cluster.counters()["draft_tokens"] == 0
        propose.is_on = True
        got = _ask_all(cluster, stop)
        cluster.wait_idle()
        counters = cluster.counters()
        _cancel_amid_an_answer(cluster)
    assert 0 < counters["draft_tokens_accepted"] < counters["draft_tokens"]
    for before, after in zip(expected, got, strict=True):
        assert after.token_ids == before.token_ids
        assert after.text == before.text
        assert (after.finish.reason, after.finish.stop_string) == (
            before.finish.reason,
            before.finish.stop_string,
        )
    assert _completion_tokens(got) == _completion_tokens(expected)
    assert [list(one.token_ids) for one in got[:6]] == [answer(p, MAX_TOKENS) for p in _prompts()]
    assert any(one.finish.stop_string for one in got)


def _completion_tokens(answers: Sequence[Answer]) -> list[int]:
    """By request. That of the samples has them told by whichever ends last: drafts decide which."""
    by_answer = [one.finish.usage.completion_tokens for one in answers]
    return [*by_answer[:-SAMPLES], sum(by_answer[-SAMPLES:])]


def _cancel_amid_an_answer(cluster: InProcessCluster) -> None:
    """Its slots come back, those of the draft with them."""
    request = inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=_prompts()[1]),
        sampling=inference.SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True),
    )
    before = cluster.counters()["draft_tokens_accepted"]
    stream = cluster.stub.Generate(request, timeout=60)
    for _ in range(5):
        next(stream)
    stream.cancel()
    cluster.wait_idle()
    assert cluster.counters()["draft_tokens_accepted"] > before
