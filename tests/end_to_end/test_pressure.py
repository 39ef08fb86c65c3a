"""The real model in an eighth of the KV that its requests want: the answers stay the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvferry.config import load_config
from kvferry.membership import Role
from tests.support.greedy_answers import (
    SHORT_ANSWER_TOKENS,
    SHORT_PROMPT_TOKENS,
    stored_answers,
)
from tests.support.in_process_cluster import InProcessCluster
from tests.support.reference import divergence

if TYPE_CHECKING:
    from tests.support.prompts import Prompt
    from tests.support.reference import ReferenceAnswer

PAGE_SIZE = 16
ROWS = 32
CONTEXT = 160
ANSWER_TOKENS = SHORT_ANSWER_TOKENS
TOKEN_BYTES = 46_080


@pytest.fixture(scope="module")
def short_prompts(prompts: list[Prompt]) -> list[Prompt]:
    return [prompt for prompt in prompts if len(prompt.ids) <= SHORT_PROMPT_TOKENS]


@pytest.fixture(scope="module")
def long_answers(short_prompts: list[Prompt]) -> list[ReferenceAnswer]:
    answers = stored_answers(short_prompts, ANSWER_TOKENS)
    return [answers[prompt.name] for prompt in short_prompts]


def _config(wanted_tokens: int, host_bytes: int) -> dict[str, str]:
    slots = wanted_tokens // 8 // PAGE_SIZE * PAGE_SIZE
    assert slots >= CONTEXT, "one request must fit"
    memory = (slots + PAGE_SIZE) * TOKEN_BYTES + 4 * (ROWS + 1) * CONTEXT
    return {
        "model.context_length": str(CONTEXT),
        "cache.page_size": str(PAGE_SIZE),
        "cache.rows": str(ROWS),
        "cache.memory_bytes": str(memory),
        "cache.host.memory_bytes": str(host_bytes),
        "cache.host.load_back_tokens_min": str(PAGE_SIZE),
        "cache.audit": "true",
        "scheduler.output_reserve": "0.1",
    }


PD, BOTH = (Role.PREFILL, Role.DECODE), (Role.BOTH,)
NO_HOST, HOST = 0, 2**26


@pytest.mark.parametrize(
    ("roles", "host_bytes"),
    [
        pytest.param(PD, HOST, id="pd, host tier"),
        pytest.param(PD, NO_HOST, id="pd, one tier", marks=pytest.mark.slow),
        pytest.param(BOTH, HOST, id="both, host tier", marks=pytest.mark.slow),
        pytest.param(BOTH, NO_HOST, id="both, one tier", marks=pytest.mark.slow),
    ],
)
def test_an_eighth_of_the_kv_gives_the_same_answers(
    roles: tuple[Role, ...],
    host_bytes: int,
    short_prompts: list[Prompt],
    long_answers: list[ReferenceAnswer],
) -> None:
    wanted = sum(len(prompt.ids) + ANSWER_TOKENS for prompt in short_prompts)
    overrides = _config(wanted, host_bytes)
    if roles == BOTH:
        overrides |= {"workers.both.count": "1", "workers.prefill.count": "0"}
        overrides |= {"workers.decode.count": "0"}
    with InProcessCluster(load_config(None, {}, overrides), roles) as cluster:
        ids = [prompt.ids for prompt in short_prompts]
        answers = cluster.generate_all(ids, ANSWER_TOKENS, at_once=len(ids))
        cluster.wait_idle()
        counters = [worker.snapshot().counters for worker in cluster.workers]

    assert sum(each["retractions"] for each in counters) > 0, "there was no pressure"
    found = [
        divergence(prompt.name, answer.token_ids, reference)
        for prompt, answer, reference in zip(short_prompts, answers, long_answers, strict=True)
    ]
    assert [entry for entry in found if entry is not None and not entry.is_tie] == []
    assert all(answer.finish.usage.attempt == 1 for answer in answers)
