"""A matrix in eight bits per element: half or a quarter of what there is to read for each token.

Symmetric, with a float32 scale for each group of neighbours in a row: `element = value * scale`.
Small groups keep one large element from costing the others their precision
(docs/decisions/0043-int8-weights.md). Products are those of the elements, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

GROUP = 32
"""Elements of a row that share a scale; the last group of a row may be shorter."""
_LARGEST = 127
_SCALE_MIN = torch.finfo(torch.float32).tiny
"""Keeps the quotient finite where all elements are (nearly) 0."""
_ROWS_AT_ONCE = 4096
"""Quantized together: a large matrix needs no second copy of itself."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix [out, in]: values int8 [out, in], scales float32 [out, groups]; both contiguous.

    What a decoder does with a matrix besides multiplying by it is written as for a tensor.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def __len__(self) -> int:
        """Rows."""
        return len(self.values)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values.device

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """The elements of some rows, float32 [N, in]; rows: int64 [N]."""
        return _elements(self.values[rows], self.scales[rows])

    def __mul__(self, factors: torch.Tensor) -> QuantizedWeight:
        """Each row times a factor of its own, [out, 1]. Nothing is rounded to other values."""
        return QuantizedWeight(self.values, self.scales * factors)

    def new_ones(self, rows: int) -> torch.Tensor:
        """Ones of the elements' type, [rows]."""
        return self.scales.new_ones(rows)

    def elements(self) -> torch.Tensor:
        """Of the whole matrix, float32 [out, in]."""
        return _elements(self.values, self.scales)


Weight: TypeAlias = torch.Tensor | QuantizedWeight
"""What a product takes: [out, in], its elements as they are or quantized."""


def are_equal(first: Weight, second: Weight) -> bool:
    """Whether two matrices are held alike and have the same elements."""
    if isinstance(first, QuantizedWeight):
        return (
            isinstance(second, QuantizedWeight)
            and torch.equal(first.values, second.values)
            and torch.equal(first.scales, second.scales)
        )
    return isinstance(second, torch.Tensor) and torch.equal(first, second)


def quantize(weight: torch.Tensor) -> QuantizedWeight:
    """The nearest values; `weight`: of any floating type, [out, in]."""
    rows, width = weight.shape
    groups = -(-width // GROUP)
    values = torch.empty(rows, width, dtype=torch.int8)
    scales = torch.empty(rows, groups)
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        padded = torch.nn.functional.pad(weight[part].float(), (0, groups * GROUP - width))
        grouped = padded.view(len(padded), groups, GROUP)
        found = (grouped.abs().amax(dim=-1) / _LARGEST).clamp_min_(_SCALE_MIN)
        scales[part] = found
        nearest = grouped.div_(found[:, :, None]).round_().clamp_(-_LARGEST, _LARGEST)
        values[part] = nearest.view(len(padded), -1)[:, :width]
    return QuantizedWeight(values, scales)


def _elements(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    width = values.shape[1]
    return values * scales.repeat_interleave(GROUP, dim=1)[:, :width]
