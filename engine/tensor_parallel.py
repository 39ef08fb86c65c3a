"""What a rank of a model that is computed by several has of it, and how the ranks' sums meet.

Rank r of R has the r-th part of the query and KV heads and of the columns of the MLP, or of every
expert: projections into them are cut by rows of their weights, those out of them by columns. What
the ranks compute of an output are summands, which `Collective.all_reduce` adds up, twice per layer.
Embedding, norms, routers and head are the same on every rank; only rank 0 uses the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `ranks` equal ones."""

    rank: int
    ranks: int

    def of(self, size: int) -> slice:
        """This part of so many rows, columns or heads."""
        assert size % self.ranks == 0, f"{size} cannot be cut into {self.ranks} equal parts"
        each = size // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)


WHOLE = Shard(0, 1)


class Collective(Protocol):
    """One rank's way to the others. Every rank makes the same calls in the same order."""

    @property
    def shard(self) -> Shard:
        """Which rank this is."""
        ...

    def all_reduce(self, summand: torch.Tensor) -> None:
        """Replace it by the sum over all ranks. Returns on no rank before every one has called.

        Raises `RuntimeError` when another rank is gone, or silent for `RANK_TIMEOUT_S`.
        """
        ...


class SoleRank:
    """Implements `Collective` where one rank has everything."""

    shard = WHOLE

    def all_reduce(self, summand: torch.Tensor) -> None:
        """The sum of one summand."""
