"""What a decoder asks of an attention implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from engine.attention.metadata import AttentionMetadata


class AttentionPlan(Protocol):
    """The work of one step, the same in every layer."""

    def run(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Causal attention of new tokens over their sequences.

        queries [T, H, D]; keys and values are one layer's pool buffers [N_slot, H_kv, D], in which
        the step's own tokens are written already. Returns [T, H * D].
        """
        ...


class AttentionBackend(Protocol):
    """An implementation of attention over paged KV."""

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Prepare one step. Called once per step, before the first layer."""
        ...
