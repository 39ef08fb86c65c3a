"""What a decoder asks of an attention implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from engine.attention.metadata import AttentionMetadata


class AttentionPlan(Protocol):
    """The work of one step, the same in every layer."""

    def run(self, queries: torch.Tensor, layer: int) -> torch.Tensor:
        """Causal attention of new tokens over their sequences in one layer of the pool.

        queries [T, H, D]; the step's own tokens are in the pool already. Returns [T, H * D] in
        the queries' dtype, whatever the pool's.
        """
        ...


class AttentionBackend(Protocol):
    """An implementation of attention over one KV pool."""

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Prepare one step. Called once per step, before the first layer."""
        ...
