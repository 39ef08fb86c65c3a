"""Rotary position embedding: the table of cosines and sines of a model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

import torch

from engine.model_spec import LinearRopeScaling, Llama3RopeScaling

if TYPE_CHECKING:
    from engine.model_spec import RopeSpec


def rope_table(rope: RopeSpec, head_dim: int, context_length: int) -> torch.Tensor:
    """float32 [context_length, head_dim]: cosines of each position, then its sines.

    Computed in float32 throughout, as `transformers` does, so that long positions round alike.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = _scaled(1.0 / (rope.theta**exponents), rope)
    angles = torch.arange(context_length).float()[:, None] * frequencies[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _scaled(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    match rope.scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor):
            return frequencies / factor
        case Llama3RopeScaling() as scaling:
            return _llama3(frequencies, scaling)
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
