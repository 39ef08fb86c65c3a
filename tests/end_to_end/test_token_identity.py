"""Greedy answers over gRPC equal those of `transformers`, token for token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from kvferry.config import load_config
from kvferry.membership import Role
from tests.support.greedy_answers import ANSWER_TOKENS
from tests.support.in_process_cluster import InProcessCluster
from tests.support.reference import divergence

if TYPE_CHECKING:
    from tests.support.prompts import Prompt
    from tests.support.reference import ReferenceAnswer

PD = (Role.PREFILL, Role.DECODE)
AGGREGATED = (Role.BOTH,)


@dataclass(frozen=True, slots=True)
class Case:
    """One way of running the same prompts."""

    roles: tuple[Role, ...]
    page_size: int
    radix: bool = True
    chunk_tokens: int = 512
    at_once: int = 16
    every: int = 1
    """Take each so many-th prompt: all kinds of them, in less time."""

    def __str__(self) -> str:
        shape = "pd" if self.roles == PD else "aggregated"
        part = f"-every{self.every}" if self.every > 1 else ""
        tree = "radix" if self.radix else "no-radix"
        return f"{shape}-page{self.page_size}-{tree}-chunk{self.chunk_tokens}-x{self.at_once}{part}"


SAMPLE = (
    Case(PD, 16, every=2),
    Case(PD, 1, radix=False, chunk_tokens=200, every=3),
    Case(PD, 64, chunk_tokens=96, every=3),
    Case(AGGREGATED, 16, at_once=4, every=3),
)
REST = tuple(
    case
    for roles in (PD, AGGREGATED)
    for page_size in (1, 16, 64)
    for radix in (True, False)
    for case in (Case(roles, page_size, radix), Case(roles, page_size, radix, 100, 1))
    if case not in SAMPLE
)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=str(case)) for case in SAMPLE),
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in REST),
    ],
)
def test_greedy_equals_transformers(
    case: Case,
    prompts: list[Prompt],
    reference_answers: dict[str, ReferenceAnswer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(prompts) >= 40
    prompts = prompts[:: case.every]
    overrides = {
        "cache.page_size": str(case.page_size),
        "cache.radix": str(case.radix),
        "cache.audit": "true",
        "scheduler.chunk_tokens": str(case.chunk_tokens),
    }
    if case.roles == AGGREGATED:
        overrides |= {"workers.both.count": "1", "workers.prefill.count": "0"}
        overrides |= {"workers.decode.count": "0"}
    config = load_config(None, {}, overrides)
    with InProcessCluster(config, case.roles) as cluster:
        answers = cluster.generate_all(
            [prompt.ids for prompt in prompts], ANSWER_TOKENS, case.at_once
        )
        # Once more and alone: whether this one finds KV depends on no order of events.
        prompts = [*prompts, prompts[-1]]
        answers.append(cluster.generate(prompts[-1].ids, ANSWER_TOKENS))
        cluster.wait_idle()

    found = [
        divergence(prompt.name, answer.token_ids, reference_answers[prompt.name])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    ties = [entry for entry in found if entry is not None and entry.is_tie]
    with capsys.disabled():
        for tie in ties:
            where = f"{tie.name}, token {tie.position}"
            print(f"\ntie in {case}: {where}: margin {tie.margin:.1e}")  # noqa: T201
    assert [entry for entry in found if entry is not None and not entry.is_tie] == []
    if case.roles == PD:
        moved = sum(answer.finish.usage.moved_tokens for answer in answers)
        hits = sum(answer.finish.usage.decode_hit_tokens for answer in answers)
        assert moved + hits == sum(len(prompt.ids) for prompt in prompts)
        assert (hits > 0) == case.radix
