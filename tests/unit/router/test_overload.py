"""The bar for overload, in simulated time: the real admission, queue and order of prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kvferry.router_config import ServiceClassConfig, ServiceClassesConfig, TenantConfig
from router.admission_settings import AdmissionSettings
from tests.support.overload_sim import Asked, OverloadSim, percentile, poisson

PROMPT_TOKENS = 1600
"""Of a usual prompt; a step computes 128."""
TOKENS_PER_S = 8000.0
WARM_S, UNTIL_S = 5.0, 30.0


@dataclass(frozen=True, slots=True)
class Cluster:
    lanes: int
    places: int
    answer_s: float
    limit_s: float

    @property
    def per_s(self) -> float:
        """Requests that it can do; about, which is enough to choose a load by."""
        prompts = self.lanes * TOKENS_PER_S / PROMPT_TOKENS
        return min(prompts, self.places / (self.answer_s + PROMPT_TOKENS / TOKENS_PER_S))

    def play(self, load: list[Asked], *, limit_s: float | None = None) -> list[Asked]:
        limit = self.limit_s if limit_s is None else limit_s
        of_class = ServiceClassConfig(queue_max=256 if limit else 10_000, ttft_limit_s=limit)
        classes = ServiceClassesConfig(of_class, of_class, of_class)
        settings = AdmissionSettings(classes, TenantConfig(), 512, step_tokens=128)
        sim = OverloadSim(settings, lanes=self.lanes, tokens_per_s=TOKENS_PER_S, places=self.places)
        return sim.run(load)

    def load(
        self, shares: dict[str, float], seconds: float, seed: int, tries_left: int = 0
    ) -> list[Asked]:
        """Of each tenant so much of the capacity."""
        load = [
            asked
            for tenant, share in shares.items()
            for asked in poisson(
                random.Random(f"{seed} {tenant}"),
                tenant,
                share * self.per_s,
                seconds,
                prompt=PROMPT_TOKENS,
                answer_s=self.answer_s,
            )
        ]
        for asked in load:
            asked.tries_left = tries_left
        return sorted(load, key=lambda asked: asked.at)


PROMPTS_SCARCE = Cluster(lanes=4, places=64, answer_s=1.0, limit_s=2.0)
PLACES_SCARCE = Cluster(lanes=4, places=16, answer_s=2.0, limit_s=2.0)
SMALL = Cluster(lanes=2, places=16, answer_s=0.6, limit_s=4.0)
"""Next to nothing may wait within the limit."""


def done_per_s(asked: list[Asked], within_s: float) -> float:
    """Answers that ended while the load was steady, of those whose first token came in time."""
    good = [
        each
        for each in asked
        if each.ttft_s is not None
        and each.ttft_s <= within_s
        and each.ended_at is not None
        and WARM_S <= each.ended_at < UNTIL_S
    ]
    return len(good) / (UNTIL_S - WARM_S)


@pytest.mark.parametrize("tenants", [1, 4])
@pytest.mark.parametrize("cluster", [PROMPTS_SCARCE, PLACES_SCARCE], ids=["prompts", "places"])
def test_three_times_the_capacity(cluster: Cluster, tenants: int) -> None:
    def load() -> list[Asked]:
        shares = {f"t{number}": 3.0 / tenants for number in range(tenants)}
        return cluster.load(shares, UNTIL_S, seed=1)

    capacity = done_per_s(cluster.play(load(), limit_s=0.0), within_s=1e9)
    asked = cluster.play(load())
    ttfts = [each.ttft_s for each in asked if each.ttft_s is not None]
    waits = [each.refused_after_s for each in asked if each.refused_after_s is not None]
    late = sum(wait > 0 for wait in waits)
    assert len(ttfts) + len(waits) == len(asked)
    assert percentile(ttfts, 0.95) <= cluster.limit_s
    assert done_per_s(asked, cluster.limit_s) >= 0.9 * capacity
    # The rest hear it at once. What was let in and turned out to be too late is little of both.
    assert late <= 0.04 * len(waits)
    assert late <= 0.08 * (late + len(ttfts))


@pytest.mark.parametrize(
    ("cluster", "share"),
    [(PROMPTS_SCARCE, 0.05), (PROMPTS_SCARCE, 0.1), (PLACES_SCARCE, 0.05), (SMALL, 0.1)],
    ids=["prompts-0.05", "prompts", "places-0.05", "small"],
)
def test_a_flood_of_one_tenant_is_its_own_trouble(cluster: Cluster, share: float) -> None:
    modest = {f"t{number}": share for number in range(4)}

    def p95_s(shares: dict[str, float]) -> float:
        played = cluster.play(cluster.load(shares, 60.0, seed=2))
        own = [each for each in played if each.tenant != "flood"]
        ttfts = [each.ttft_s for each in own if each.ttft_s is not None]
        assert len(ttfts) >= 0.99 * len(own) > 0
        return percentile(ttfts, 0.95)

    assert p95_s(modest | {"flood": 3.0}) <= 1.2 * p95_s(modest)


def test_a_flood_that_begins_beside_tenants_at_work_is_its_own_trouble() -> None:
    """In its first seconds, in which nobody has gone without anything yet."""
    begin_s, end_s = 6.0, 9.0
    alone: list[float] = []
    beside: list[float] = []
    for seed in range(12):
        flood = SMALL.load({"flood": 3.0}, end_s - begin_s, seed)
        for asked in flood:
            asked.at += begin_s
        for ttfts, more in ((alone, []), (beside, flood)):
            modest = SMALL.load({f"t{number}": 0.1 for number in range(4)}, end_s, seed)
            for asked in SMALL.play(modest + more):
                if asked.tenant != "flood" and asked.at >= begin_s:
                    ttfts.append(float("inf") if asked.ttft_s is None else asked.ttft_s)
    assert len(beside) == len(alone) > 100
    assert percentile(beside, 0.95) <= 1.5 * percentile(alone, 0.95)


@pytest.mark.parametrize("cluster", [PROMPTS_SCARCE, PLACES_SCARCE], ids=["prompts", "places"])
def test_who_asks_again_when_told_to_is_accepted(cluster: Cluster) -> None:
    """Ten seconds of three times the capacity, then half of it, besides those that come again."""
    names = [f"t{number}" for number in range(4)]
    refused: list[Asked] = []
    for seed in (3, 5):
        load = cluster.load(dict.fromkeys(names, 0.75), 10.0, seed=seed, tries_left=9)
        for asked in cluster.load(dict.fromkeys(names, 0.125), 30.0, seed=seed + 1, tries_left=9):
            asked.at += 10.0
            load.append(asked)
        refused += [each for each in cluster.play(load) if each.again is not None]
    second = [each.again for each in refused if each.again is not None]
    third = [each.again or each for each in second]
    assert len(refused) > 100
    assert sum(each.ttft_s is not None for each in second) >= 0.75 * len(refused)
    assert sum(each.ttft_s is not None for each in third) >= 0.9 * len(refused)
