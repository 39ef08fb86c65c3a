"""Answers whose KV goes back to the worker that computed the prompt, in a whole cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.config import KvReturn, SchedulerConfig
from tests.support.digest_cluster import digest_cluster, digest_config
from tests.support.digest_model import VOCAB, answer
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from kvferry.config import ClusterConfig
    from tests.support.in_process_cluster import InProcessCluster

TURNS, USER_TOKENS, ANSWER_TOKENS = 5, 11, 23


def _config(page_size: int, policy: KvReturn, slots: int = 1024) -> ClusterConfig:
    config = digest_config(page_size, slots, scheduler=SchedulerConfig())
    return replace(config, handoff=replace(config.handoff, kv_return=policy))


def _returned(cluster: InProcessCluster, number: int) -> None:
    """Wait for the end of the `number`th return."""
    prefill, decode = (worker.snapshot for worker in cluster.workers)
    wait_until(
        f"return {number}",
        lambda: (
            prefill().counters.get("sink_adopted", 0) == number
            and decode().counters.get("source_closed", 0) == number
        ),
        5.0,
        state=lambda: (prefill().counters, decode().counters),
    )


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_only_what_the_user_says_is_computed(page_size):
    random = np.random.default_rng(3)
    tokens: list[int] = []
    hits = []
    with digest_cluster(_config(page_size, KvReturn.ALWAYS)) as made:
        for turn in range(1, TURNS + 1):
            known = len(tokens)
            tokens += random.integers(10, VOCAB, USER_TOKENS).tolist()
            said = made.generate(tokens, ANSWER_TOKENS)
            assert list(said.token_ids) == answer(tokens, ANSWER_TOKENS)
            usage = said.finish.usage
            # All but the last token of the answer, in whole pages: nobody has computed that one.
            cached = max(0, known - 1) // page_size * page_size
            assert usage.prefill_hit_tokens == cached
            assert usage.decode_hit_tokens == cached
            hits.append(usage.prefill_hit_tokens)
            tokens += said.token_ids
            _returned(made, turn)
        made.wait_idle()
    assert hits[-1] > 2 * ANSWER_TOKENS


def test_under_pressure_every_answer_is_that_of_an_undisturbed_run():
    random = np.random.default_rng(11)
    shared = random.integers(10, VOCAB, 16).tolist()
    prompts = [shared + random.integers(10, VOCAB, 5 + n % 20).tolist() for n in range(40)]
    # A sixth of what they would take together.
    config = _config(4, KvReturn.ALWAYS, slots=256)
    config = replace(config, scheduler=SchedulerConfig(output_reserve=0.0))
    with digest_cluster(config) as made:
        answers = made.generate_all(prompts, 24, at_once=20)
        made.wait_idle()
        prefill, decode = (worker.snapshot().counters for worker in made.workers)
    assert [list(one.token_ids) for one in answers] == [answer(p, 24) for p in prompts]
    assert decode["retractions"] > 0, "there was no pressure"
    assert decode["offers_sent"] > 0
    assert prefill["offers_taken"] > 0
    assert prefill["retractions"] == 0


@pytest.mark.parametrize("policy", [KvReturn.NEVER, KvReturn.AUTO])
def test_nothing_goes_back_where_it_is_not_wanted_or_not_worth_it(policy):
    prompt = list(range(10, 40))
    with digest_cluster(_config(4, policy)) as made:
        # Two tokens more than the prompt are half a page: no handoff is worth that.
        for tokens in (2, 3):
            made.generate([*prompt, tokens], tokens)
        made.wait_idle()
        prefill, decode = (worker.snapshot().counters for worker in made.workers)
    assert prefill.get("sink_started", 0) == decode.get("bytes_sent", 0) == 0


def test_of_several_samples_none_goes_back():
    with digest_cluster(_config(4, KvReturn.ALWAYS)) as made:
        made.generate_samples(list(range(10, 40)), 3, 16)
        made.generate(list(range(50, 80)), 16)
        _returned(made, 1)
        made.wait_idle()
        assert made.counters()["offers_sent"] == 1
