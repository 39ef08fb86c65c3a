"""Decides who computes prompts, who decodes, and how many there are. Pure.

Every interval: what is asked for (`planner_demand`), how loaded either role is in each split of the
workers (`planner_capacity`), and the split whose busier role has the least load. The planner goes
there if that load is less by `margin` and the busier role is short of room (`_COMFORT`): on a
steady load random moments would else move workers to and fro. It goes step by step, no faster than
`switches_per_minute`, and nobody changes its role again within `hold_s`.

To change a worker's role costs little. It keeps its cache and ends what it has: answers beside the
prompts that come, or prompts beside the answers, which slows both for a moment. So it is the worker
with least to end that changes.

Where no split of the workers keeps the targets for `resize_after_s`, one is added; where one less
would keep them for so long, one is taken out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from cluster.planner_capacity import (
    DecodeCapacity,
    PromptCapacity,
    PromptRate,
    StepTime,
    Targets,
)
from cluster.planner_demand import DemandMeter
from kvferry.membership import Role

if TYPE_CHECKING:
    from cluster.planner_demand import Demand
    from cluster.planner_input import Observation, WorkerSeen
    from kvferry.ids import WorkerId
    from kvferry.planner_config import PlannerConfig

_COMFORT = 0.85
"""Below this load there is room for what a forecast misses: nothing is to be gained."""
_BURST_SHARE = 0.25
"""Of a minute's switches that may come at once."""
_KV_TELLS = 0.5
"""Share of the KV slots in use from which on it says how many sequences would fill them."""
_RESIZE_COMFORT = 0.7
"""Load at which one worker less is still enough."""


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """Use this worker for something else."""

    worker_id: WorkerId
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class AddWorker:
    """Start one more worker."""

    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Drain this worker and end it."""

    worker_id: WorkerId
    reason: str


Decision: TypeAlias = SwitchRole | AddWorker | RemoveWorker


@dataclass(frozen=True, slots=True)
class Split:
    """One way to divide the workers, and what it would be like."""

    prefill: int
    decode: int
    prompt_load: float
    """Of 1 the targets are just kept."""
    answer_load: float

    @property
    def load(self) -> float:
        """Of the busier role."""
        return max(self.prompt_load, self.answer_load)


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers behind a plan."""

    demand: Demand
    prefill_tokens_per_s: float
    """Of one worker."""
    decode: DecodeCapacity
    """Of one worker."""
    now: Split
    best: Split
    """Of as many workers; it may be `now`."""
    fewer: Split | None
    """The best of one worker less; None: there would be too few."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one look came to."""

    at_s: float
    decisions: tuple[Decision, ...]
    """In the order in which they are to be carried out."""
    verdict: str
    """Why these, or why none."""
    figures: Figures | None
    """None: too little was seen to say anything."""


@dataclass(slots=True)
class _Pace:
    """How many switches may be made now."""

    per_minute: float
    saved: float = field(init=False)
    at_s: float | None = None

    def __post_init__(self) -> None:
        self.saved = self.most

    @property
    def most(self) -> float:
        return max(1.0, _BURST_SHARE * self.per_minute)

    def refill(self, now: float) -> int:
        """Time went on; whole switches that may be made."""
        if self.at_s is not None:
            self.saved = min(self.most, self.saved + (now - self.at_s) * self.per_minute / 60.0)
        self.at_s = now
        return int(self.saved)


@dataclass(frozen=True, slots=True)
class _Capacity:
    demand: Demand
    prompts: PromptCapacity
    answers: DecodeCapacity
    targets: Targets

    def split(self, prefill: int, decode: int) -> Split:
        return Split(
            prefill,
            decode,
            self.prompts.load(self.demand, prefill, self.targets),
            self.answers.load(self.demand, decode, self.targets),
        )


class Planner:
    """One per cluster. Not thread safe."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._targets = Targets(config.ttft_s, config.itl_ms / 1000.0, config.attainment)
        self._meter = DemandMeter()
        self._step_time = StepTime()
        self._prompt_rate = PromptRate()
        self._pace = _Pace(config.switches_per_minute)
        self._switched_at: dict[WorkerId, float] = {}
        self._short_since: float | None = None
        self._ample_since: float | None = None

    def plan(self, seen: Observation) -> Plan:
        """Look once. What is decided counts as done."""
        figures = self._figures(seen)
        switches = self._pace.refill(seen.at_s)
        if figures is None:
            return Plan(seen.at_s, (), "nothing measured yet", None)
        resizing = self._resize(seen, figures)
        if resizing is not None:
            return Plan(seen.at_s, (resizing,), resizing.reason, figures)
        verdict = self._objection(figures)
        if verdict:
            return Plan(seen.at_s, (), verdict, figures)
        decisions = self._switches(seen, figures, switches)
        verdict = decisions[0].reason if decisions else f"too soon: {_loads(figures.now)}"
        return Plan(seen.at_s, decisions, verdict, figures)

    # --- what there is --------------------------------------------------------------------------

    def _figures(self, seen: Observation) -> Figures | None:
        demand = self._meter.learn(seen)
        steps = [worker.decode for worker in seen.workers]
        self._step_time.learn(steps, seen.traffic.seconds)
        self._prompt_rate.learn(seen.workers, seen.traffic.seconds)
        rate = self._prompt_rate.tokens_per_s
        workers = _switchable(seen)
        line = self._step_time.line
        if not rate or line is None or len(workers) < self._least:
            return None
        capacity = _Capacity(
            demand,
            PromptCapacity(rate),
            DecodeCapacity.of(line, _places(seen), self._targets),
            self._targets,
        )
        prefill = sum(worker.role is Role.PREFILL for worker in workers)
        now = capacity.split(prefill, len(workers) - prefill)
        enough = len(workers) > self._least
        return Figures(
            demand,
            capacity.prompts.tokens_per_s,
            capacity.answers,
            now,
            self._best(capacity, len(workers), prefill),
            self._best(capacity, len(workers) - 1, prefill) if enough else None,
        )

    @property
    def _least(self) -> int:
        return self._config.prefill_min + self._config.decode_min

    def _best(self, capacity: _Capacity, workers: int, prefill: int) -> Split:
        """The split with the least load of the busier role, nearest to `prefill`."""
        most = workers - self._config.decode_min
        splits = (
            capacity.split(each, workers - each)
            for each in range(self._config.prefill_min, most + 1)
        )
        return min(splits, key=lambda each: (each.load, abs(each.prefill - prefill)))

    # --- what to do -----------------------------------------------------------------------------

    def _objection(self, figures: Figures) -> str:
        """Why nobody changes its role; empty: nothing speaks against it."""
        now, best = figures.now, figures.best
        if now.load < _COMFORT:
            return f"there is room: {_loads(now)}"
        if best.prefill == now.prefill:
            return f"no other split is better: {_loads(now)}"
        if best.load > (1.0 - self._config.margin) * now.load:
            return f"{best.prefill}:{best.decode} would be little better: {_loads(now)}"
        return ""

    def _switches(self, seen: Observation, figures: Figures, most: int) -> tuple[Decision, ...]:
        now, best = figures.now, figures.best
        role = Role.PREFILL if best.prefill > now.prefill else Role.DECODE
        free = [worker for worker in _switchable(seen) if self._may_switch(worker, role, seen.at_s)]
        free.sort(key=_left_to_do)
        count = min(most, abs(best.prefill - now.prefill), len(free))
        reason = _reason(seen, figures, self._targets)
        for worker in free[:count]:
            self._switched_at[worker.worker_id] = seen.at_s
        self._pace.saved -= count
        return tuple(
            SwitchRole(worker.worker_id, role, f"{worker.worker_id} -> {role.value}: {reason}")
            for worker in free[:count]
        )

    def _may_switch(self, worker: WorkerSeen, role: Role, now: float) -> bool:
        switched_at = self._switched_at.get(worker.worker_id)
        has_held = switched_at is None or now - switched_at >= self._config.hold_s
        return worker.role is not role and has_held

    def _resize(self, seen: Observation, figures: Figures) -> AddWorker | RemoveWorker | None:
        """One worker more or less, where that has been wanted for long enough."""
        config, workers = self._config, figures.now.prefill + figures.now.decode
        now, fewer = seen.at_s, figures.fewer
        short = figures.best.load > 1.0 and workers + seen.starting < config.workers_max
        ample = fewer is not None and fewer.load < _RESIZE_COMFORT and workers > config.workers_min
        self._short_since = _since(self._short_since, short, now)
        self._ample_since = _since(self._ample_since, ample, now)
        if not config.workers_max or seen.starting:
            return None
        if self._has_lasted(self._short_since, now):
            self._short_since = now
            return _more(figures.best)
        if fewer is not None and self._has_lasted(self._ample_since, now):
            self._ample_since = now
            return _less(seen, figures.now, fewer)
        return None

    def _has_lasted(self, since: float | None, now: float) -> bool:
        return since is not None and now - since >= self._config.resize_after_s


def _since(since: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if since is None else since


def _more(best: Split) -> AddWorker:
    role = Role.PREFILL if best.prompt_load > best.answer_load else Role.DECODE
    return AddWorker(role, f"no split of {best.prefill + best.decode} will do: {_loads(best)}")


def _less(seen: Observation, now: Split, fewer: Split) -> RemoveWorker:
    """The worker with least to end, of the role that would have fewer."""
    role = Role.PREFILL if fewer.prefill < now.prefill else Role.DECODE
    those = [worker for worker in _switchable(seen) if worker.role is role]
    least = min(those, key=_left_to_do)
    reason = f"{fewer.prefill + fewer.decode} would do: {_loads(fewer)}"
    return RemoveWorker(least.worker_id, reason)


def _left_to_do(worker: WorkerSeen) -> tuple[int, int, str]:
    return worker.decoding, worker.prompt_tokens, worker.worker_id


def _places(seen: Observation) -> float:
    """Sequences that a worker decodes together: as many as it may, or as its KV has room for where
    that fills up first."""
    held = [worker for worker in seen.workers if worker.decodes and worker.decoding]
    share = sum(worker.kv_share for worker in held)
    if share < _KV_TELLS * len(held) or not held:
        return float(seen.running_max)
    return min(seen.running_max, sum(worker.decoding for worker in held) / share)


def _switchable(seen: Observation) -> list[WorkerSeen]:
    """Who may be used for something else: who has one of the two roles, and stays."""
    return [worker for worker in seen.workers if worker.is_open and worker.role is not Role.BOTH]


def _loads(split: Split) -> str:
    return (
        f"prompts load {split.prefill} to {split.prompt_load:.0%},"
        f" answers {split.decode} to {split.answer_load:.0%}"
    )


def _reason(seen: Observation, figures: Figures, targets: Targets) -> str:
    now, best, traffic = figures.now, figures.best, seen.traffic
    if best.prefill > now.prefill:
        wanted, have, what = now.prompt_load * now.prefill, now.prefill, "prompts"
        p90, target, name = traffic.ttft.p90_s, targets.ttft_s, "TTFT"
    else:
        wanted, have, what = now.answer_load * now.decode, now.decode, "answers"
        p90, target, name = traffic.itl.p90_s, targets.itl_s, "ITL"
    side = "over" if p90 > target else "within"
    return (
        f"{what} need {wanted:.1f} workers, have {have}; {name} p90 {p90:.3g} s {side} {target:g} s"
    )
