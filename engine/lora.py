"""What LoRA adapters add to linear maps, for the tokens that are computed with one.

A module with weight W has for an adapter two thin matrices, A [rank, in] and B [out, rank]; with
the adapter it computes W x + scale B A x. Tokens of one adapter are neighbours in a batch, so that
each adapter in it is some small products over a slice, added in place, whatever else the batch
holds. A batch without adapters does nothing of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from engine.lora_kernels import TOKENS_MAX, add_low_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.ids import AdapterId


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Tokens of a batch that are computed with one adapter."""

    adapter: AdapterId
    rows: slice


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """Where a module's part of a shrunk input goes."""

    ranks: slice
    """Its columns of what `LowRankUpdate.down` gives."""
    columns: slice
    """Its columns of the product."""
    up: torch.Tensor
    """[rank, columns]: B transposed, with the adapter's scale in it."""


class LowRankUpdate:
    """What one adapter adds to one product, which may be of several modules side by side."""

    def __init__(self, down: torch.Tensor, expansions: Sequence[Expansion]) -> None:
        """down [ranks, in]: A of each module, stacked."""
        self._down = down
        ups = torch.cat([part.up.reshape(-1) for part in expansions])
        self._expansions: list[Expansion] = []
        self._parts = np.empty((len(expansions), 5), dtype=np.int64)
        """See `lora_kernels.add_low_rank`."""
        start = 0
        for row, part in zip(self._parts, expansions, strict=True):
            ranks, columns = part.up.shape
            row[:] = part.ranks.start, ranks, part.columns.start, columns, start
            up = ups[start : start + part.up.numel()].view(ranks, columns)
            self._expansions.append(Expansion(part.ranks, part.columns, up))
            start += up.numel()
        is_native = down.dtype == torch.float32 and down.device.type == "cpu"
        self._native = (down.numpy(), ups.numpy()) if is_native else None

    def add(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """To out [T, columns], in place, what inputs [T, in] give."""
        if self._native is not None and len(inputs) <= TOKENS_MAX:
            down, ups = self._native
            add_low_rank(inputs.numpy(), down, self._parts, ups, out.numpy())
            return
        shrunk = functional.linear(inputs, self._down)
        for part in self._expansions:
            out[:, part.columns].addmm_(shrunk[:, part.ranks], part.up)

    def scaled(self, rows: torch.Tensor) -> LowRankUpdate:
        """Of a product whose rows [columns] are multiplied by these."""
        expansions = [
            Expansion(part.ranks, part.columns, part.up * rows[part.columns])
            for part in self._expansions
        ]
        return LowRankUpdate(self._down, expansions)
