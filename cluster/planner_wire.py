"""Plans as messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.planner import AddWorker, Decision, Plan, RemoveWorker, Split, SwitchRole
from kvferry.rpc.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.planner import Figures


def plan_to_wire(plan: Plan, outcomes: Sequence[str], now: float) -> inference_pb2.Plan:
    """`outcomes`: what became of each decision so far. `now` on the plan's clock."""
    message = inference_pb2.Plan(age_s=now - plan.at_s, verdict=plan.verdict)
    for decision, outcome in zip(plan.decisions, outcomes, strict=False):
        message.steps.append(_step_to_wire(decision, outcome))
    if plan.figures is not None:
        message.figures.CopyFrom(_figures_to_wire(plan.figures))
    return message


def _step_to_wire(decision: Decision, outcome: str) -> inference_pb2.PlannedStep:
    step = inference_pb2.PlannedStep(reason=decision.reason, outcome=outcome)
    match decision:
        case SwitchRole(worker_id, role, _):
            step.kind, step.worker_id, step.role = "switch", worker_id, role.value
        case AddWorker(role, _):
            step.kind, step.role = "add", role.value
        case RemoveWorker(worker_id, _):
            step.kind, step.worker_id = "remove", worker_id
    return step


def _figures_to_wire(figures: Figures) -> inference_pb2.PlanFigures:
    demand = figures.demand
    return inference_pb2.PlanFigures(
        prompt_tokens_per_s=demand.prompt_tokens_per_s,
        prompt_tokens=demand.prompt_tokens,
        backlog_tokens=demand.backlog_tokens,
        answer_tokens_per_s=demand.answer_tokens_per_s,
        answer_tokens=demand.answer_tokens,
        sequences=demand.sequences,
        prefill_tokens_per_s=figures.prefill_tokens_per_s,
        sequences_max=figures.decode.sequences,
        now=_split_to_wire(figures.now),
        best=_split_to_wire(figures.best),
    )


def _split_to_wire(split: Split) -> inference_pb2.SplitLoad:
    return inference_pb2.SplitLoad(
        prefill=split.prefill,
        decode=split.decode,
        prompt_load=split.prompt_load,
        answer_load=split.answer_load,
    )
