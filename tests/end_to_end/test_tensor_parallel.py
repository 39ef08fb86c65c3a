"""Workers of any number of ranks answer as `transformers`, whatever the two of a pair have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.config import load_config
from kvferry.membership import Role
from tests.support.in_process_cluster import InProcessCluster
from tests.support.reference import Reference, divergence
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from kvferry.config import ClusterConfig
    from tests.support.prompts import Prompt
    from tests.support.reference import ReferenceAnswer

PD = (Role.PREFILL, Role.DECODE)
PAIRS = [(prefill, decode) for prefill in (1, 2, 4) for decode in (1, 2, 4)]
TINY = TinyLlama(num_layers=3, num_heads=8, num_kv_heads=4)
ANSWER_TOKENS = 8
DRAWN = {"temperature": 8.0, "seed": 7}
"""Hot: the logits of the tiny model have a spread of tens."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return make_tiny_llama(directory, TINY, tokenizer_from=model_directory)


@pytest.fixture(scope="module")
def tiny_prompts() -> list[list[int]]:
    """Around a page of 16, longer than a step, and two that share a beginning."""
    draw = np.random.default_rng(3)
    lengths = (1, 15, 16, 17, 40, 150)
    prompts: list[list[int]] = [draw.integers(3, 49152, length).tolist() for length in lengths]
    return [*prompts, prompts[-1][:100] + prompts[0], prompts[-1][:100] + prompts[1]]


@pytest.fixture(scope="module")
def tiny_answers(tiny: Path, tiny_prompts: list[list[int]]) -> list[ReferenceAnswer]:
    reference = Reference(tiny)
    return [reference.greedy(prompt, ANSWER_TOKENS) for prompt in tiny_prompts]


def config_of(prefill: int, decode: int, **settings: str) -> ClusterConfig:
    overrides = {
        "workers.prefill.tensor_parallel": str(prefill),
        "workers.decode.tensor_parallel": str(decode),
        "workers.both.tensor_parallel": str(decode),
        "handoff.checksums": "true",
        "cache.audit": "true",
        "cache.memory_bytes": str(256 * 2**20),
    }
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return load_config(None, {}, overrides | given)


def tiny_config(tiny: Path, prefill: int, decode: int, **settings: str) -> ClusterConfig:
    return config_of(
        prefill,
        decode,
        model__path=str(tiny),
        model__context_length="512",
        cache__memory_bytes=str(8 * 2**20),
        scheduler__chunk_tokens="64",
        **settings,
    )


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_greedy_equals_transformers(
    pair: tuple[int, int],
    tiny: Path,
    tiny_prompts: list[list[int]],
    tiny_answers: list[ReferenceAnswer],
) -> None:
    with InProcessCluster(tiny_config(tiny, *pair), PD) as cluster:
        answers = cluster.generate_all(tiny_prompts, ANSWER_TOKENS, at_once=4)
        cluster.wait_idle()
    for number, (answer, expected) in enumerate(zip(answers, tiny_answers, strict=True)):
        assert divergence(f"prompt {number}", answer.token_ids, expected) is None
    usages = [answer.finish.usage for answer in answers]
    moved = sum(usage.moved_tokens for usage in usages)
    hits = sum(usage.decode_hit_tokens for usage in usages)
    assert moved + hits == sum(map(len, tiny_prompts))
    token_bytes = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert sum(usage.moved_bytes for usage in usages) == moved * token_bytes


@pytest.mark.parametrize("settings", [{"cache__dtype": "int8"}, {"cache__arrangement": "hnd"}])
def test_any_kv_may_be_cut_anew(
    settings: dict[str, str], tiny: Path, tiny_prompts: list[list[int]]
) -> None:
    with InProcessCluster(tiny_config(tiny, 1, 1, **settings), (Role.BOTH,)) as alone:
        expected = [alone.generate(ids, ANSWER_TOKENS).token_ids for ids in tiny_prompts]
    with InProcessCluster(tiny_config(tiny, 4, 2, **settings), PD) as pair:
        answers = [pair.generate(ids, ANSWER_TOKENS).token_ids for ids in tiny_prompts]
        pair.wait_idle()
    assert answers == expected


@pytest.mark.parametrize("roles", [PD, (Role.BOTH,)], ids=["pd", "aggregated"])
def test_samples_fork_on_every_rank(
    roles: tuple[Role, ...], tiny: Path, tiny_prompts: list[list[int]]
) -> None:
    """The last page of a prompt, partly full, is copied for each sample, in every rank's pool."""
    asked = tiny_prompts[3:5]
    with InProcessCluster(tiny_config(tiny, 1, 1), (Role.BOTH,)) as alone:
        expected = [sampled(alone, ids) for ids in asked]
    with InProcessCluster(tiny_config(tiny, 2, 4), roles) as cluster:
        answers = [sampled(cluster, ids) for ids in asked]
        assert cluster.counters()["samples_forked"] == 2 * len(asked)
        cluster.wait_idle()
    assert answers == expected
    assert all(len(set(samples)) > 1 for samples in expected), "the samples tell nothing apart"


def sampled(cluster: InProcessCluster, ids: list[int]) -> list[tuple[int, ...]]:
    answers = cluster.generate_samples(ids, 3, ANSWER_TOKENS, **DRAWN)
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def real_answers(
    prompts: list[Prompt], reference_answers: dict[str, ReferenceAnswer]
) -> list[tuple[Prompt, ReferenceAnswer]]:
    asked = [prompt for prompt in prompts if prompt.name in ("length-17", "length-65")]
    return [(prompt, reference_answers[prompt.name]) for prompt in asked]


@pytest.mark.slow
@pytest.mark.parametrize("pair", [(3, 1), (1, 3)], ids=str)
def test_the_real_model_on_three_ranks(
    pair: tuple[int, int], real_answers: list[tuple[Prompt, ReferenceAnswer]]
) -> None:
    """SmolLM2 has nine query heads and three KV heads."""
    with InProcessCluster(config_of(*pair, model__context_length="1024"), PD) as cluster:
        for prompt, expected in real_answers:
            answer = cluster.generate(prompt.ids, ANSWER_TOKENS)
            found = divergence(prompt.name, answer.token_ids, expected)
            assert found is None or found.is_tie, found
        cluster.wait_idle()
    assert len(real_answers) == 2
