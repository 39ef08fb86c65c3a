"""Several samples through a whole cluster: one prompt computed, moved once, and parted there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvferry.config import SchedulerConfig
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.sampling import SamplingParams
from tests.support.digest_cluster import digest_cluster, digest_config
from tests.support.digest_model import VOCAB, answer
from tests.support.waiting import wait_until

PAIR = (Role.PREFILL, Role.DECODE)
N = 4
MAX_TOKENS = 12
DRAWN = {"temperature": 3.0, "seed": 11}


def _prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCAB, length).tolist()


@pytest.mark.parametrize("roles", [PAIR, (Role.BOTH,)], ids=["pair", "both"])
@pytest.mark.parametrize("radix", [True, False], ids=["radix", "chunk"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_samples_are_single_answers_for_one_prefill_and_one_transfer(
    page_size: int, radix: bool, roles: tuple[Role, ...]
) -> None:
    prompts = [_prompt(length, length) for length in (1, 16, 37, 64)]
    config = digest_config(page_size, 1024, radix=radix, scheduler=SchedulerConfig())
    with digest_cluster(config, roles) as made:
        greedy = [made.generate_samples(prompt, N, MAX_TOKENS) for prompt in prompts]
        counters = made.counters()
        drawn = [made.generate_samples(prompt, N, MAX_TOKENS, **DRAWN) for prompt in prompts]
        params = SamplingParams(n=N, seed=DRAWN["seed"])
        seeds = [params.of_sample(sample).seed for sample in range(N)]
        single = [
            [made.generate(prompt, MAX_TOKENS, **DRAWN | {"seed": seed}) for seed in seeds]
            for prompt in prompts
        ]
        made.wait_idle()
    is_moved = roles == PAIR
    for prompt, answers in zip(prompts, greedy, strict=True):
        assert [list(one.token_ids) for one in answers] == N * [answer(prompt, MAX_TOKENS)]
        (usage,) = [one.finish.usage for one in answers if one.finish.HasField("usage")]
        assert usage.moved_tokens == (len(prompt) if is_moved else 0)
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), N * MAX_TOKENS)
    assert counters["sink_adopted"] == counters["source_closed"] == is_moved * len(prompts)
    assert counters["samples_forked"] == (N - 1) * len(prompts)
    assert [[one.token_ids for one in answers] for answers in drawn] == [
        [one.token_ids for one in answers] for answers in single
    ]


@pytest.mark.parametrize("page_size", [1, 16])
def test_under_pressure_every_sample_completes_as_if_alone(page_size: int) -> None:
    prompts = [_prompt(seed, 20 + 3 * seed) for seed in range(10)]
    config = digest_config(page_size, 256, scheduler=SchedulerConfig(output_reserve=0.0))
    with digest_cluster(config) as made, ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: made.generate_samples(prompt, 5, 30), prompts))
        made.wait_idle()
        counters = made.counters()
    for prompt, samples in zip(prompts, answers, strict=True):
        assert [list(one.token_ids) for one in samples] == 5 * [answer(prompt, 30)]
        assert {one.finish.usage.attempt for one in samples} <= {0, 1}
    assert counters["retractions"] > 0, "there was no pressure"


def test_a_sample_that_meets_its_stop_string_is_not_computed_on() -> None:
    config = digest_config(16, 8192, scheduler=SchedulerConfig())
    with digest_cluster(config) as made:
        request = inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=_prompt(3, 40)),
            sampling=inference.SamplingParams(
                max_tokens=1500, n=N, ignore_eos=True, temperature=3.0, seed=5, stop=["Q"]
            ),
        )
        stream = made.stub.Generate(request, timeout=60)
        end = next(response for response in stream if response.HasField("finish"))
        assert end.finish.stop_string == "Q"
        decode = made.workers[1]
        # Its siblings still are.
        wait_until("one sample less", lambda: 0 < decode.snapshot().load.running < N)
        stream.cancel()
        made.wait_idle()


@pytest.mark.parametrize("tokens", [0, 1, 9], ids=["waiting", "first token", "decoding"])
def test_a_client_that_leaves_ends_all_samples(tokens: int) -> None:
    config = digest_config(16, 1024, scheduler=SchedulerConfig())
    with digest_cluster(config) as made:
        request = inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=_prompt(1, 100)),
            sampling=inference.SamplingParams(max_tokens=200, n=N, ignore_eos=True, seed=1),
        )
        for _ in range(3):
            stream = made.stub.Generate(request, timeout=60)
            for _ in range(tokens):
                next(stream)
            stream.cancel()
            made.wait_idle()
        wait_until("no request is left", lambda: made.router.requests_in_flight == 0)
        assert [list(one.token_ids) for one in made.generate_samples(_prompt(2, 30), 2, 5)] == (
            2 * [answer(_prompt(2, 30), 5)]
        )
