"""What eight bits keep of a matrix."""

from __future__ import annotations

import pytest
import torch

from engine.operators.quantized_weight import GROUP, are_equal, quantize


def _grouped_largest(weight: torch.Tensor) -> torch.Tensor:
    """The largest of each element's group, [out, in]."""
    parts = [part.abs().amax(1, keepdim=True).expand_as(part) for part in weight.split(GROUP, 1)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 100])
def test_an_element_moves_by_half_a_step_of_its_group(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # More rows than are quantized together.
    weight = torch.randn(5000, width).to(dtype)
    found = quantize(weight)
    assert (found.values.dtype, found.scales.dtype) == (torch.int8, torch.float32)
    error = (found.elements().double() - weight.double()).abs()
    assert (error <= _grouped_largest(weight.double()) / 127 * 0.50001).all()


def test_a_large_element_costs_only_its_group() -> None:
    weight = torch.full((1, 3 * GROUP), 0.5)
    weight[0, 0] = 1000.0
    elements = quantize(weight).elements()
    assert torch.equal(elements[:, GROUP:], weight[:, GROUP:])
    assert (elements[0, 1:GROUP] == 0).all()


def test_zeros_and_signs_stay() -> None:
    weight = torch.zeros(2, GROUP + 1)
    weight[1, :2] = torch.tensor([-2.0, 2.0])
    assert torch.equal(quantize(weight).elements(), weight)


def test_rows_and_factors_are_those_of_the_elements() -> None:
    torch.manual_seed(0)
    weight = quantize(torch.randn(6, 40))
    chosen, factors = torch.tensor([4, 0, 4]), torch.rand(6, 1)
    assert len(weight) == 6
    assert torch.equal(weight[chosen], weight.elements()[chosen])
    torch.testing.assert_close((weight * factors).elements(), weight.elements() * factors)
    assert weight.new_ones(3).dtype == torch.float32


def test_equal_are_copies_held_alike() -> None:
    weight = torch.randn(4, 40)
    other = weight.clone()
    other[3, 39] += 1.0
    assert are_equal(quantize(weight), quantize(weight.clone()))
    assert not are_equal(quantize(weight), quantize(other))
    assert are_equal(weight, weight.clone())
    assert not are_equal(weight, other)
    assert not are_equal(weight, quantize(weight))
    assert not are_equal(quantize(weight), weight)
