"""What steps are expected to cost, on machines that are made up."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.token_gaps import percentile
from engine.step_cost import StepCost, StepShape


@dataclass(frozen=True)
class Machine:
    """Its costs in seconds, and how uneven it is."""

    step: float = 0.03
    decode_token: float = 0.002
    context_token: float = 1e-6
    prompt_token: float = 0.002
    pair: float = 2e-7
    noise: float = 0.0

    def seconds(self, shape: StepShape, rng: random.Random | None = None) -> float:
        seconds = (
            self.step
            + self.decode_token * shape.decode_tokens
            + self.context_token * shape.decode_context
            + self.prompt_token * shape.prompt_tokens
            + self.pair * shape.prompt_pairs
        )
        if rng is None:
            return seconds
        pause = 4.0 if rng.random() < 0.01 else 1.0
        return seconds * pause * rng.uniform(1.0 - self.noise, 1.0 + self.noise)


def _decoding(sequences: int, context: int) -> StepShape:
    return StepShape(sequences, sequences * context)


def _learned(machine: Machine) -> StepCost:
    cost = StepCost()
    for at in range(40):
        cost.observe(
            _decoding(1 + at % 7, 100 + 10 * at),
            machine.seconds(_decoding(1 + at % 7, 100 + 10 * at)),
        )
        mixed = _decoding(4, 100).with_prompt(16 + 8 * (at % 9), 64 * at)
        cost.observe(mixed, machine.seconds(mixed))
    return cost


def test_nothing_is_known_at_first() -> None:
    cost = StepCost()
    assert cost.prompt_tokens(_decoding(4, 100), 0, 10.0, 128) == 0
    cost.observe(_decoding(4, 100), 0.05)
    assert cost.bound(_decoding(4, 100)) == pytest.approx(0.05, rel=0.01)
    assert cost.prompt_tokens(_decoding(4, 100), 0, 10.0, 128) == 0, "no prompt was seen"


@pytest.mark.parametrize("sequences", [1, 4, 12])
@pytest.mark.parametrize(("tokens", "start"), [(0, 0), (16, 0), (64, 512), (80, 1500)])
def test_what_is_linear_is_learned(sequences: int, tokens: int, start: int) -> None:
    machine = Machine()
    shape = _decoding(sequences, 300)
    shape = shape.with_prompt(tokens, start) if tokens else shape
    assert _learned(machine).bound(shape) == pytest.approx(machine.seconds(shape), rel=0.15)


def test_tokens_fill_the_limit_and_no_more() -> None:
    machine = Machine()
    cost, decoding = _learned(machine), _decoding(4, 200)
    tokens = cost.prompt_tokens(decoding, 256, 0.15, 128)
    assert 30 < tokens < 60
    assert cost.bound(decoding.with_prompt(tokens, 256)) <= 0.15
    assert cost.bound(decoding.with_prompt(tokens + 1, 256)) > 0.15
    assert cost.prompt_tokens(decoding, 256, 0.15, 20) == 20
    assert cost.prompt_tokens(decoding, 256, 0.02, 128) == 0
    assert cost.prompt_tokens(decoding, 256, 100.0, 10_000) == 2 * 80, "twice what was tried"


def test_a_pause_is_no_news_and_a_slower_machine_is() -> None:
    cost, shape = _learned(Machine()), _decoding(4, 200)
    before = cost.bound(shape)
    cost.observe(shape, 30.0)
    assert cost.bound(shape) < 2.0 * before
    slow = Machine(step=0.3, decode_token=0.02)
    for _ in range(30):
        cost.observe(shape, slow.seconds(shape))
    assert cost.bound(shape) >= slow.seconds(shape)


def test_long_decoding_forgets_nothing_of_prompts() -> None:
    cost, mixed = _learned(Machine()), _decoding(4, 100).with_prompt(64, 512)
    before = cost.bound(mixed)
    for _ in range(500):
        cost.observe(_decoding(4, 100), Machine().seconds(_decoding(4, 100)))
    assert cost.bound(mixed) == pytest.approx(before, rel=0.1)


_MACHINES = st.builds(
    Machine,
    step=st.floats(0.005, 0.1),
    decode_token=st.floats(0.0, 0.01),
    context_token=st.floats(0.0, 1e-5),
    prompt_token=st.floats(0.0005, 0.01),
    pair=st.floats(0.0, 2e-6),
    noise=st.floats(0.0, 0.1),
)


@settings(max_examples=12, deadline=None)
@given(_MACHINES, st.floats(1.3, 6.0), st.integers(0, 2**16))
def test_gaps_keep_the_limit_on_any_machine_and_prompts_progress(
    machine: Machine, ease: float, seed: int
) -> None:
    rng, cost, least, most = random.Random(seed), StepCost(), 16, 124
    worst = _decoding(4, 600).with_prompt(least, 2048)
    limit_s = ease * machine.seconds(worst)
    gaps: list[float] = []
    done = at = possible = 0
    for number in range(300):
        shape = _decoding(4, 200 + number)
        if number >= 20:
            tokens = max(cost.prompt_tokens(shape, at, limit_s, most), least)
            fit = (
                n
                for n in range(most, 0, -1)
                if machine.seconds(shape.with_prompt(n, at)) <= limit_s
            )
            possible += next(fit)
            shape = shape.with_prompt(tokens, at)
            done += tokens
            at = (at + tokens) % 2048
        seconds = machine.seconds(shape, rng)
        cost.observe(shape, seconds)
        if number >= 20:
            gaps.append(seconds)
    assert percentile(gaps, 95) <= 1.15 * limit_s
    assert done >= 0.4 * possible
