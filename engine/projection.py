"""A linear map of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from engine.operators.interface import Operators


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """weight [out, in], bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def apply(self, operators: Operators, inputs: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return operators.linear(inputs, self.weight, self.bias)
