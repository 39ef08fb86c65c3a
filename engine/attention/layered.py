"""Attention whose window differs from layer to layer. Knows no backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from engine.attention.backend import AttentionBackend, AttentionPlan
    from engine.attention.metadata import AttentionMetadata


class LayeredAttention:
    """Implements `AttentionBackend` by a backend per layer; layers that are alike share theirs."""

    def __init__(self, layers: Sequence[AttentionBackend]) -> None:
        self._layers = layers

    def plan(self, metadata: AttentionMetadata) -> LayeredPlan:
        """See `AttentionBackend.plan`. Each backend plans once."""
        plans = {backend: backend.plan(metadata) for backend in dict.fromkeys(self._layers)}
        return LayeredPlan([plans[backend] for backend in self._layers])


class LayeredPlan:
    """Implements `AttentionPlan`."""

    def __init__(self, layers: Sequence[AttentionPlan]) -> None:
        self._layers = layers

    def run(self, queries: torch.Tensor, layer: int) -> torch.Tensor:
        """See `AttentionPlan.run`."""
        return self._layers[layer].run(queries, layer)
