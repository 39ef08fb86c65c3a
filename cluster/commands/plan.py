"""`plan`: what the planner decided lately, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.commands.flags import add_address, add_command, client_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvferry.rpc.v1 import inference_pb2 as inference


def add(commands: Any) -> None:
    """Add the command of this file."""
    plan = add_command(commands, "plan", _plan, "show what the planner decided lately, and why")
    plan.add_argument("--last", type=int, default=20, help="looks to show; default: %(default)s")
    plan.add_argument("--explain", action="store_true", help="show the figures behind each")
    add_address(plan)


def _plan(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        answer = client.plans(max(1, arguments.last))
    for line in plan_lines(answer, explain=arguments.explain):
        print(line)  # noqa: T201


def plan_lines(answer: inference.PlansResponse, *, explain: bool) -> Iterator[str]:
    """The oldest look first, so that the last line is the latest news."""
    yield f"planner: {answer.mode}"
    if not answer.plans and answer.mode != "off":
        yield "no look yet"
    for plan in reversed(answer.plans):
        yield f"{plan.age_s:6.0f} s ago  {plan.verdict}"
        for step in plan.steps:
            name = step.worker_id or "a worker"
            role = f" -> {step.role}" if step.role else ""
            yield f"{'':14}{step.kind} {name}{role}: {step.outcome}"
        if explain and plan.HasField("figures"):
            yield from (f"{'':14}{line}" for line in _figure_lines(plan.figures))


def _figure_lines(figures: inference.PlanFigures) -> Iterator[str]:
    yield (
        f"prompts: {figures.prompt_tokens_per_s:,.0f} tokens/s asked, {figures.prompt_tokens:,.0f}"
        f" each, {figures.backlog_tokens:,.0f} waiting; a worker computes"
        f" {figures.prefill_tokens_per_s:,.0f}/s"
    )
    yield (
        f"answers: {figures.answer_tokens_per_s:,.0f} tokens/s asked, {figures.answer_tokens:,.0f}"
        f" each, {figures.sequences:,.0f} at once; a worker decodes"
        f" {figures.sequences_max:,.1f} at once within the target"
    )
    for name, split in (("now", figures.now), ("best", figures.best)):
        yield (
            f"{name:4} {split.prefill}:{split.decode}  prompts {split.prompt_load:.0%},"
            f" answers {split.answer_load:.0%} of what keeps the targets"
        )
