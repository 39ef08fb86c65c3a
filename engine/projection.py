"""A linear map of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from engine.lora import AdapterRows, LowRankUpdate
    from engine.operators.interface import Operators
    from engine.operators.quantized_weight import Weight
    from kvferry.ids import AdapterId


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """weight [out, in], bias [out]."""

    weight: Weight
    bias: torch.Tensor | None = None
    updates: Mapping[AdapterId, LowRankUpdate] = field(default_factory=dict)
    """Of the adapters that have one for it."""

    def apply(
        self, operators: Operators, inputs: torch.Tensor, adapted: Sequence[AdapterRows] = ()
    ) -> torch.Tensor:
        """[T, in] -> [T, out]; of the tokens of `adapted` with what their adapters add."""
        out = operators.linear(inputs, self.weight, self.bias)
        for tokens in adapted:
            update = self.updates.get(tokens.adapter)
            if update is not None:
                update.add(inputs[tokens.rows], out[tokens.rows])
        return out
