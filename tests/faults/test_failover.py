"""Workers are killed at random moments, and no client can tell."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvferry.membership import Role
from tests.support.digest_model import EOS, VOCAB
from tests.support.failover_load import Streams, ask, questions
from tests.support.fault_cluster import FaultCluster
from tests.support.fault_episode import IDLE_WITHIN_S, WHOLE_WITHIN_S
from tests.support.fault_model import fault_config
from tests.support.small_tokenizer import write_tokenizer
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

pytestmark = pytest.mark.cluster

STREAMS = 16
KEYS = {"name", "sizes", "old"}
PAUSE_MAX_S = 0.5
"""Between a whole cluster and the next kill; an answer takes about as long."""


@pytest.fixture
def cluster(tmp_path):
    """Its model has a vocabulary in which JSON can be written."""
    model = make_tiny_llama(tmp_path / "model", TinyLlama(vocab_size=VOCAB, eos_token_id=EOS))
    write_tokenizer(model)
    config = fault_config("")
    config = replace(config, model=replace(config.model, path=str(model)))
    with FaultCluster(config, tmp_path) as made:
        made.wait_whole(WHOLE_WITHIN_S)
        yield made


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_answers_outlive_their_workers(cluster, kills):
    """By turns one of the decode and one of the prefill workers, at times both at once."""
    requests = questions(seed=kills)
    with ThreadPoolExecutor(STREAMS) as pool:
        numbers = range(len(requests))
        undisturbed = list(
            pool.map(lambda number: ask(cluster.address, number, requests[number]), numbers)
        )
    assert [outcome.error for outcome in undisturbed] == [""] * len(requests)
    expected = [outcome.reply for outcome in undisturbed]
    assert sum(reply.completion_tokens for reply in expected) > 500
    objects = [r for r, q in zip(expected, requests, strict=True) if q.sampling.json_schema]
    assert all(json.loads(reply.samples[0].text).keys() == KEYS for reply in objects)
    streams = Streams(cluster.address, requests, expected, STREAMS)
    streams.start()
    try:
        _kill(cluster, random.Random(kills), kills)
    finally:
        streams.stop()
    cluster.wait_whole(WHOLE_WITHIN_S)
    cluster.assert_idle(IDLE_WITHIN_S)
    disturbed = sum(outcome.attempt > 1 for outcome in streams.outcomes)
    report = {
        "kills": kills,
        "requests": len(streams.outcomes),
        "with_several_attempts": disturbed,
        "attempts_most": max(outcome.attempt for outcome in streams.outcomes),
        "problems": streams.problems(),
    }
    print(json.dumps(report))  # noqa: T201
    assert report["problems"] == []
    assert disturbed >= kills / 2, "hardly anybody was struck"
    assert cluster.new_errors() == []


def _kill(cluster, rng, kills):
    killed = 0
    while killed < kills:
        cluster.wait_whole(WHOLE_WITHIN_S)
        time.sleep(rng.uniform(0.0, PAUSE_MAX_S))
        roles = [Role.PREFILL if killed % 2 else Role.DECODE]
        if killed % 10 == 4:
            roles = [Role.PREFILL, Role.DECODE]
        for role in roles:
            cluster.kill(rng.choice(cluster.of_role(role)))
        killed += len(roles)
