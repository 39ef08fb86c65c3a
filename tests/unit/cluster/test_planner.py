"""What a planner decides, look by look, in simulated time."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cluster.planner import AddWorker, Planner, RemoveWorker, SwitchRole
from cluster.planner_input import DecodeSteps, Latency, Observation, Traffic, WorkerSeen
from kvferry.ids import WorkerId
from kvferry.membership import Role
from kvferry.planner_config import PlannerConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.planner import Plan

CONFIG = PlannerConfig(ttft_s=2.0, itl_ms=25.0)
# One step of n sequences takes 8 + 0.3 n ms: 56 sequences within 25 ms.
STEP_S, SEQUENCE_S, RUNNING_MAX = 0.008, 0.0003, 64


class Scene:
    """A cluster that is as loaded as it is asked for, whatever the split."""

    def __init__(self, prefill: int, decode: int, config: PlannerConfig = CONFIG) -> None:
        roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
        self.roles = {WorkerId(f"w{number}"): role for number, role in enumerate(roles)}
        self.config = config
        self.planner = Planner(config)
        self.now = 0.0
        self.starting = 0
        self.left_to_do: dict[WorkerId, int] = {}

    @property
    def split(self) -> tuple[int, int]:
        prefill = list(self.roles.values()).count(Role.PREFILL)
        return prefill, len(self.roles) - prefill

    def look(self, per_s: float, prompt: int, answer: int, ttft_p90_s: float = 0.5) -> Plan:
        """So many requests a second of such lengths since the last look."""
        seconds = self.config.interval_s
        self.now += seconds
        requests = round(per_s * seconds)
        sequences = per_s * answer * 0.02
        workers = tuple(self._seen(name, role, sequences) for name, role in self.roles.items())
        traffic = Traffic(
            seconds,
            requests=requests,
            prompts=requests,
            prompt_tokens=requests * prompt,
            prompt_tokens_squared=1.25 * requests * prompt**2,
            answers=requests,
            answer_tokens=requests * answer,
            ttft=Latency(requests, requests // 2, 0.2, ttft_p90_s),
        )
        seen = Observation(self.now, workers, traffic, RUNNING_MAX, self.starting)
        plan = self.planner.plan(seen)
        for decision in plan.decisions:
            match decision:
                case SwitchRole(worker_id, role, _):
                    assert self.roles[worker_id] is not role
                    self.roles[worker_id] = role
                case RemoveWorker(worker_id, _):
                    del self.roles[worker_id]
                case AddWorker(role, _):
                    self.roles[WorkerId(f"new{self.now}")] = role
        return plan

    def looks(self, count: int, per_s: float, prompt: int, answer: int) -> list[Plan]:
        return [self.look(per_s, prompt, answer) for _ in range(count)]

    def _seen(self, name: WorkerId, role: Role, sequences: float) -> WorkerSeen:
        decoding = 0 if role is Role.PREFILL else round(sequences / self.split[1])
        steps = 100 if decoding else 0
        seconds = steps * (STEP_S + SEQUENCE_S * decoding)
        return WorkerSeen(
            name,
            role,
            decoding=self.left_to_do.get(name, decoding),
            prefill_tokens_per_s=8000.0,
            decode=DecodeSteps(steps, steps * decoding, seconds),
        )


def switches(plans: Iterable[Plan]) -> list[SwitchRole]:
    return [one for plan in plans for one in plan.decisions if isinstance(one, SwitchRole)]


def test_prompts_that_need_more_workers_get_them_and_give_them_back() -> None:
    scene = Scene(4, 4)
    scene.looks(15, 9.0, 4000, 60)
    assert scene.split[0] >= 6
    scene.looks(20, 11.0, 300, 800)
    assert scene.split[1] >= 6


def test_the_reason_says_what_is_needed_and_what_was_seen() -> None:
    scene = Scene(1, 7)
    plan = next(
        plan for plan in iter(lambda: scene.look(5.0, 4000, 60, 4.1), None) if plan.decisions
    )
    (first, *_) = switches([plan])
    assert first.worker_id == "w1"
    assert first.reason.startswith("w1 -> prefill: prompts need ")
    assert " workers, have 1; TTFT p90 4.1 s over 2 s" in first.reason
    assert plan.verdict == first.reason


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_load_moves_nobody_to_and_fro(seed: int) -> None:
    rng, scene = random.Random(seed), Scene(4, 4)
    plans = []
    for _ in range(300):
        per_s = max(1.0, rng.gauss(10.0, 1.5))
        plans.append(
            scene.look(per_s, round(rng.uniform(1500, 2500)), round(rng.uniform(250, 350)))
        )
    assert len(switches(plans)) <= 4
    assert not switches(plans[150:])


def test_switches_come_no_faster_than_allowed_and_nobody_switches_back_at_once() -> None:
    config = replace(CONFIG, switches_per_minute=12.0, hold_s=10.0)
    scene = Scene(8, 8, config)
    rng, last, times = random.Random(1), {}, []
    for _ in range(600):
        heavy = rng.random() < 0.5
        plan = scene.look(18.0 if heavy else 22.0, 4000 if heavy else 300, 60 if heavy else 800)
        for one in switches([plan]):
            assert plan.at_s - last.get(one.worker_id, -1e9) >= config.hold_s
            last[one.worker_id] = plan.at_s
            times.append(plan.at_s)
    assert times
    for start in times:
        within = sum(start <= each < start + 60.0 for each in times)
        assert within <= 12 + 3, "a minute's switches, and what was saved before"


def test_each_role_keeps_its_least() -> None:
    scene = Scene(4, 4, replace(CONFIG, prefill_min=2, decode_min=3))
    scene.looks(30, 12.0, 4000, 60)
    assert scene.split == (5, 3)
    scene.looks(30, 14.0, 300, 800)
    assert scene.split == (2, 6)


def test_the_worker_with_least_to_end_is_the_one_that_switches() -> None:
    scene = Scene(1, 4)
    scene.left_to_do = {WorkerId(f"w{number}"): 10 - number for number in range(1, 5)}
    first = next(
        one for plan in iter(lambda: scene.look(4.0, 4000, 60), None) for one in plan.decisions
    )
    assert isinstance(first, SwitchRole)
    assert first.worker_id == "w4"


def test_nothing_is_decided_before_anything_was_measured() -> None:
    planner = Planner(CONFIG)
    workers = tuple(WorkerSeen(WorkerId(f"w{n}"), role) for n, role in enumerate(Role))
    plan = planner.plan(Observation(1.0, workers, Traffic(2.0, requests=100), RUNNING_MAX))
    assert (plan.decisions, plan.figures) == ((), None)
    assert plan.verdict == "nothing measured yet"


def test_workers_that_drain_or_have_both_roles_are_left_alone() -> None:
    planner = Planner(CONFIG)
    decode = DecodeSteps(10, 100, 0.11)
    workers = (
        WorkerSeen(WorkerId("p"), Role.PREFILL, prefill_tokens_per_s=8000.0),
        WorkerSeen(WorkerId("d"), Role.DECODE, decode=decode),
        WorkerSeen(WorkerId("b"), Role.BOTH, decode=decode),
        WorkerSeen(WorkerId("gone"), Role.DECODE, is_open=False, decode=decode),
    )
    traffic = Traffic(2.0, 20, 20, 80_000, 4e8, 20, 1200)
    for number in range(10):
        plan = planner.plan(Observation(2.0 * number, workers, traffic, RUNNING_MAX))
        assert plan.decisions == ()
    assert plan.figures is not None
    assert (plan.figures.now.prefill, plan.figures.now.decode) == (1, 1)


def test_a_worker_is_added_where_no_split_will_do_for_long_enough() -> None:
    config = replace(CONFIG, workers_max=10, workers_min=4, resize_after_s=60.0)
    scene = Scene(4, 4, config)
    plans = scene.looks(90, 20.0, 4000, 60)
    added = [plan for plan in plans if any(isinstance(one, AddWorker) for one in plan.decisions)]
    assert len(scene.roles) == 10
    assert added[0].at_s >= 60.0
    assert added[1].at_s - added[0].at_s >= 60.0
    assert "no split of 8 will do" in added[0].verdict


def test_a_worker_is_taken_out_where_fewer_would_do_but_not_below_the_least() -> None:
    config = replace(CONFIG, workers_max=10, workers_min=4, resize_after_s=60.0)
    scene = Scene(4, 4, config)
    plans = scene.looks(200, 4.0, 1000, 100)
    removed = [plan for plan in plans if any(isinstance(d, RemoveWorker) for d in plan.decisions)]
    assert len(scene.roles) == 4
    assert len(removed) == 4
    assert min(scene.split) >= 1


def test_the_number_stays_where_it_is_not_to_be_changed_or_one_is_starting() -> None:
    scene = Scene(4, 4)
    scene.looks(60, 30.0, 4000, 60)
    assert len(scene.roles) == 8
    scene = Scene(4, 4, replace(CONFIG, workers_max=10, workers_min=1))
    scene.starting = 1
    scene.looks(60, 30.0, 4000, 60)
    assert len(scene.roles) == 8


def test_kv_that_fills_up_first_bounds_the_sequences_of_a_worker() -> None:
    planner = Planner(CONFIG)
    decode = DecodeSteps(100, 1000, 100 * (STEP_S + 10 * SEQUENCE_S))
    workers = (
        WorkerSeen(WorkerId("p"), Role.PREFILL, prefill_tokens_per_s=8000.0),
        WorkerSeen(WorkerId("d"), Role.DECODE, decoding=10, kv_share=0.8, decode=decode),
    )
    plan = planner.plan(Observation(2.0, workers, Traffic(2.0, 20, 20, 9000), RUNNING_MAX))
    assert plan.figures is not None
    assert plan.figures.decode.sequences == pytest.approx(12.5)
