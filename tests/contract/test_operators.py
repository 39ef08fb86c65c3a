"""Every implementation of `Operators` against float64."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch

from engine.crew import Crew
from engine.operators.native_operators import NativeOperators
from engine.operators.quantized_weight import quantize
from engine.operators.torch_operators import TorchOperators

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.operators.interface import Operators

EPS = 1e-5


@pytest.fixture(params=["torch", "native", "threads"])
def operators(request: pytest.FixtureRequest) -> Iterator[Operators]:
    torch.manual_seed(0)
    if request.param == "torch":
        yield TorchOperators()
        return
    with closing(Crew(1 if request.param == "native" else 2)) as crew:
        yield NativeOperators(crew)


def _norm(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = inputs.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 7, 32, 65, 129, 200])
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (6, 9), (64, 500), (4099, 96)])
def test_linear(operators: Operators, tokens: int, rows: int, width: int) -> None:
    inputs, weight = torch.randn(tokens, width), torch.randn(rows, width)
    expected = inputs.double() @ weight.double().t()
    torch.testing.assert_close(
        operators.linear(inputs, weight).double(), expected, atol=5e-5, rtol=1e-5
    )


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 65, 129])
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (7, 8), (64, 100), (4099, 32)])
def test_linear_of_quantized_weights(
    operators: Operators, tokens: int, rows: int, width: int
) -> None:
    """The product of the elements that the weight stands for; groups may end short."""
    inputs, weight = torch.randn(tokens, width), quantize(torch.randn(rows, width))
    expected = inputs.double() @ weight.elements().double().t()
    found = operators.linear(inputs, weight)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)
    bias = torch.randn(rows)
    found = operators.linear(inputs, weight, bias)
    torch.testing.assert_close(found.double(), expected + bias.double(), atol=2e-5, rtol=1e-5)


def test_a_product_is_the_same_in_steps_of_two_to_128_tokens() -> None:
    """So that K and V do not depend on how a prompt is cut."""
    torch.manual_seed(0)
    inputs, weight = torch.randn(128, 100), torch.randn(70, 100)
    for held in (weight, quantize(weight)):
        with closing(Crew(2)) as crew:
            operators = NativeOperators(crew)
            whole = operators.linear(inputs, held)
            for count in (2, 3, 5, 64, 127):
                assert torch.equal(operators.linear(inputs[:count], held), whole[:count])


@pytest.mark.parametrize("tokens", [1, 33])
def test_linear_with_bias(operators: Operators, tokens: int) -> None:
    inputs, weight, bias = torch.randn(tokens, 96), torch.randn(70, 96), torch.randn(70)
    before = bias.clone()
    expected = inputs.double() @ weight.double().t() + bias.double()
    found = operators.linear(inputs, weight, bias)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)
    assert torch.equal(bias, before)


@pytest.mark.parametrize("tokens", [1, 5])
def test_rms_norm(operators: Operators, tokens: int) -> None:
    inputs, weight = 3 * torch.randn(tokens, 72), torch.randn(72)
    out = operators.rms_norm(inputs, weight, EPS)
    torch.testing.assert_close(out.double(), _norm(inputs, weight), atol=1e-6, rtol=1e-5)


def test_add_rms_norm_changes_the_residual(operators: Operators) -> None:
    residual, update, weight = torch.randn(4, 40), torch.randn(4, 40), torch.randn(40)
    total = residual + update
    before = update.clone()
    out = operators.add_rms_norm(residual, update, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(update, before)
    torch.testing.assert_close(out.double(), _norm(total, weight), atol=1e-6, rtol=1e-5)


def test_silu_and_mul(operators: Operators) -> None:
    extremes = torch.tensor([0.0, -0.0, 1e-8, 20.0, -20.0, 100.0, -100.0, 1e4, -1e4])
    gate = torch.cat([extremes, torch.randn(91)])[None].repeat(3, 1)
    up = torch.randn(3, 100)
    out = operators.silu_and_mul(torch.cat([gate, up], dim=1))
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)


def test_gelu_tanh_and_mul(operators: Operators) -> None:
    extremes = torch.tensor([0.0, -0.0, 1e-8, 20.0, -20.0, 100.0, -100.0, 1e4, -1e4])
    gate = torch.cat([extremes, torch.randn(91)])[None].repeat(3, 1)
    up = torch.randn(3, 100)
    out = operators.gelu_tanh_and_mul(torch.cat([gate, up], dim=1))
    wide = gate.double()
    inner = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    expected = 0.5 * wide * (1 + inner.tanh()) * up.double()
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)


def test_norm_heads_changes_q_and_k(operators: Operators) -> None:
    tokens, heads, kv_heads, head_dim = 5, 4, 2, 24
    qkv = 3 * torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    query_weight, key_weight = torch.randn(head_dim), torch.randn(head_dim)
    queries, keys, values = qkv.clone().view(tokens, -1, head_dim).split([4, 2, 2], dim=1)
    operators.norm_heads(qkv, query_weight, key_weight, kv_heads, EPS)
    found = qkv.view(tokens, -1, head_dim)
    expected = torch.cat([_norm(queries, query_weight), _norm(keys, key_weight)], dim=1)
    torch.testing.assert_close(found[:, :6].double(), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(found[:, 6:], values)


def test_rope_and_write(operators: Operators) -> None:
    tokens, heads, kv_heads, head_dim = 5, 4, 2, 8
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    angles = torch.rand(10, head_dim // 2) * 6
    rope = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions, slots = torch.tensor([3, 4, 9, 0, 1]), torch.tensor([7, 2, 11, 5, 6])
    keys, values = torch.full((2, 12, kv_heads, head_dim), torch.nan).unbind()
    whole = qkv.double().view(tokens, -1, head_dim)
    first, second = whole.chunk(2, dim=-1)
    cosines, sines = rope[positions].double()[:, None].chunk(2, dim=-1)
    rotated = torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
    queries = operators.rope_and_write(qkv, rope, positions, slots, keys, values)
    close = {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(queries.double(), rotated[:, :heads], **close)
    torch.testing.assert_close(keys[slots].double(), rotated[:, heads : heads + kv_heads], **close)
    torch.testing.assert_close(values[slots].double(), whole[:, heads + kv_heads :], **close)
    untouched = sorted(set(range(12)) - set(slots.tolist()))
    assert keys[untouched].isnan().all()
    assert values[untouched].isnan().all()
