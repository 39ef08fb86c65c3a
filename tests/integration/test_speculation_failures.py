"""Answers with drafts that are cut off, resumed and cancelled: nobody can tell, nothing is left."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import grpc
import pytest

from engine.speculation import Drafts
from kvferry.config import SchedulerConfig
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.cutting_client import Cuts
from tests.support.digest_cluster import digest_cluster, digest_config
from tests.support.draft_oracle import ALWAYS, Remembered, foreseen
from tests.support.failover_load import Said, said
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.in_process_cluster import InProcessCluster

PROMPT = list(range(20, 61))
LENGTH = 12
ROLES = (Role.PREFILL, Role.DECODE, Role.DECODE)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "penalties": {"temperature": 2.0, "seed": 8, "logprobs": 0, "frequency_penalty": 1.5},
    "min tokens": {
        "temperature": 3.0,
        "seed": 9,
        "min_tokens": 6,
        "stop_token_ids": list(range(0, 211, 2)),
    },
    "samples": {"temperature": 3.0, "seed": 2, "n": 3, "stop_token_ids": list(range(40))},
}


def _request(options: dict[str, Any]) -> inference.GenerateRequest:
    return inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=PROMPT),
        sampling=inference.SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True} | options),
    )


def _ask(cluster: InProcessCluster, cuts: Cuts, after: Sequence[int], **options: Any) -> list[Said]:
    cuts.after.extend(after)
    responses = list(cluster.stub.Generate(_request(options), timeout=60))
    assert not cuts.after, "not every cut was made"
    return [said(responses, index) for index in range(options.get("n", 1))]


def test_cut_at_any_token_nobody_can_tell() -> None:
    cuts, remembered = Cuts(), Remembered(random.Random(4))
    config = digest_config(8, 512, scheduler=SchedulerConfig(chunk_tokens=16))
    with (
        patch("cluster.worker_process.drafts_of", lambda _: Drafts(remembered, 4, ALWAYS)),
        digest_cluster(config, ROLES, cuts.connect) as cluster,
    ):
        for options in KINDS.values():
            whole = _ask(cluster, cuts, (), **options)
            for sample in whole:
                remembered.learn(PROMPT, sample.token_ids)
            total = sum(len(sample.token_ids) for sample in whole)
            for cut in range(total + 1):
                assert _ask(cluster, cuts, [cut], **options) == whole, (options, cut)
            assert _ask(cluster, cuts, [1, 3, 0, 2], **options) == whole
        cluster.wait_idle()
        counters = cluster.counters()
    assert 0 < counters["draft_tokens_accepted"] < counters["draft_tokens"]


@pytest.mark.parametrize("requests", [24, pytest.param(400, marks=pytest.mark.slow)])
def test_after_a_storm_of_cancellations_nothing_is_left(requests: int) -> None:
    """At random places of prompts and answers, while some are retracted for want of slots."""
    draw = random.Random(requests)
    config = digest_config(8, 384, scheduler=SchedulerConfig(output_reserve=0.0))
    with (
        patch("cluster.worker_process.drafts_of", lambda _: Drafts(foreseen, 3, ALWAYS)),
        digest_cluster(config, ROLES) as cluster,
    ):
        whole = cluster.generate(PROMPT, 60).token_ids

        def ask(read: int) -> None:
            """Some tokens, of which there may be more in one message."""
            sampling = inference.SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
            prompt = inference.TokenIds(ids=PROMPT)
            stream = cluster.stub.Generate(
                inference.GenerateRequest(token_ids=prompt, sampling=sampling), timeout=60
            )
            got: list[int] = []
            with suppress(grpc.RpcError):
                while len(got) < read:
                    got += next(stream).token_ids
                stream.cancel()
            assert tuple(got) == whole[: len(got)]

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(ask, [draw.choice((0, 0, 1, 2, 9, 30, 59)) for _ in range(requests)]))
        wait_until("all ends", lambda: cluster.router.requests_in_flight == 0)
        cluster.wait_idle()
        assert cluster.generate(PROMPT, 60).token_ids == whole
        assert cluster.counters()["draft_tokens_accepted"] > 0
