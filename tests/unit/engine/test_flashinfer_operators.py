"""FlashInfer's operators, on a strict stand-in, against torch's."""

from __future__ import annotations

import pytest
import torch

from engine.operators.flashinfer_operators import FlashInferOperators
from engine.operators.torch_operators import TorchOperators
from tests.support import fake_flashinfer

EPS = 1e-5
OURS, TORCH = FlashInferOperators(fake_flashinfer), TorchOperators()
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def _near(found: torch.Tensor, expected: torch.Tensor) -> None:
    # Two roundings of the narrower type.
    step = 2 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, atol=step, rtol=step)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@DTYPES
def test_norms(dtype: torch.dtype) -> None:
    inputs, update = (3 * torch.randn(5, 96).to(dtype) for _ in range(2))
    weight = torch.randn(96).to(dtype)
    _near(OURS.rms_norm(inputs, weight, EPS), TORCH.rms_norm(inputs, weight, EPS))
    residual, expected_residual = inputs.clone(), inputs.clone()
    expected = TORCH.add_rms_norm(expected_residual, update, weight, EPS)
    _near(OURS.add_rms_norm(residual, update.clone(), weight, EPS), expected)
    _near(residual, expected_residual)


@DTYPES
def test_activations(dtype: torch.dtype) -> None:
    gate_up = 2 * torch.randn(5, 64).to(dtype)
    _near(OURS.silu_and_mul(gate_up), TORCH.silu_and_mul(gate_up))
    _near(OURS.gelu_tanh_and_mul(gate_up), TORCH.gelu_tanh_and_mul(gate_up))


@DTYPES
def test_norms_of_heads(dtype: torch.dtype) -> None:
    qkv = 2 * torch.randn(5, (4 + 2 * 2) * 64).to(dtype)
    weights = torch.randn(2, 64).to(dtype)
    expected = qkv.clone()
    TORCH.norm_heads(expected, *weights, 2, EPS)
    OURS.norm_heads(qkv, *weights, 2, EPS)
    _near(qkv, expected)


@DTYPES
def test_rotation_and_slots(dtype: torch.dtype) -> None:
    angles = torch.arange(128)[:, None] / 100 ** torch.linspace(0, 2, 32)
    rope = torch.cat([angles.cos(), angles.sin()], dim=1)
    qkv = torch.randn(5, (4 + 2 * 2) * 64).to(dtype)
    positions, slots = torch.tensor([3, 0, 127, 4, 90]), torch.tensor([9, 1, 2, 30, 4])
    pools = torch.zeros(2, 2, 32, 2, 64).to(dtype)
    found, expected = (
        operators.rope_and_write(qkv.clone(), rope, positions, slots, *pool)
        for operators, pool in ((OURS, pools[0]), (TORCH, pools[1]))
    )
    assert found.is_contiguous()
    _near(found, expected)
    _near(pools[0], pools[1])
