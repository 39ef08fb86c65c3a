"""Runs a Hypothesis state machine as often and as long as a test wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.stateful import RuleBasedStateMachine


def run_machine(
    make: Callable[[], RuleBasedStateMachine], *, examples: int, steps: int, seed: int | None
) -> None:
    """`examples` runs of up to `steps` steps; always the same ones with a `seed`.

    Nothing is remembered between runs, so that a sample does not depend on earlier ones.
    """
    run_state_machine_as_test(
        make if seed is None else hypothesis.seed(seed)(make),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
