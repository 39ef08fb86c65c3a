"""Rotary position embedding: the table of cosines and sines of a model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

import torch

from engine.rope_spec import LinearRopeScaling, Llama3RopeScaling, YarnRopeScaling

if TYPE_CHECKING:
    from engine.rope_spec import RopeSpec


def rope_table(rope: RopeSpec, head_dim: int, context_length: int) -> torch.Tensor:
    """float32 [context_length, head_dim]: cosines of each position, then its sines.

    Computed in float32 throughout, as `transformers` does, so that long positions round alike.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies, magnitude = _scaled(rope.theta**exponents, rope)
    angles = torch.arange(context_length).float()[:, None] * frequencies[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=1).mul_(magnitude)


def _scaled(periods: torch.Tensor, rope: RopeSpec) -> tuple[torch.Tensor, float]:
    """Frequencies [head_dim / 2] of these periods, and what cosines and sines are multiplied by."""
    match rope.scaling:
        case None:
            return 1.0 / periods, 1.0
        case LinearRopeScaling(factor):
            return 1.0 / periods / factor, 1.0
        case Llama3RopeScaling() as scaling:
            return _llama3(1.0 / periods, scaling), 1.0
        case YarnRopeScaling() as scaling:
            return _yarn(periods, rope.theta, scaling), scaling.magnitude
        case _:
            assert_never(rope.scaling)


def _llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Keep wavelengths short against the original context, stretch long ones, blend between."""
    wavelengths = 2 * math.pi / frequencies
    periods = scaling.original_context_length / wavelengths
    blend = (periods - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(periods: torch.Tensor, theta: float, scaling: YarnRopeScaling) -> torch.Tensor:
    """As `_llama3`, blending along the dimensions."""
    head_dim = 2 * len(periods)

    def dimension(rotations: float) -> float:
        """Whose frequency has so many rotations in the original context."""
        wavelength = scaling.original_context_length / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.whole_dimensions:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Never a division by zero.
    width = high - low or 0.001
    stretched = ((torch.arange(len(periods)).float() - low) / width).clamp(0.0, 1.0)
    kept = 1 - stretched
    return (1.0 / (scaling.factor * periods)) * (1 - kept) + (1.0 / periods) * kept
