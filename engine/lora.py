"""What LoRA adapters add to linear maps, for the tokens that are computed with one.

A module with weight W has for an adapter two thin matrices, A [rank, in] and B [out, rank]; with
the adapter it computes W x + scale B A x. Tokens of one adapter are neighbours in a batch, so that
each adapter in it is two or more small products over a slice, added in place, whatever else the
batch holds. A batch without adapters does nothing of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch

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


@dataclass(frozen=True, slots=True, eq=False)
class LowRankUpdate:
    """What one adapter adds to one product, which may be of several modules side by side."""

    down: torch.Tensor
    """[ranks, in]: A of each module, stacked."""
    expansions: tuple[Expansion, ...]

    def add(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """To out [T, columns], in place, what inputs [T, in] give."""
        shrunk = functional.linear(inputs, self.down)
        for part in self.expansions:
            out[:, part.columns].addmm_(shrunk[:, part.ranks], part.up)

    def scaled(self, rows: torch.Tensor) -> LowRankUpdate:
        """Of a product whose rows [columns] are multiplied by these."""
        expansions = (
            Expansion(part.ranks, part.columns, part.up * rows[part.columns])
            for part in self.expansions
        )
        return LowRankUpdate(self.down, tuple(expansions))
