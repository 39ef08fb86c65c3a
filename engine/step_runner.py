"""What the engine asks of a loaded model, on whatever device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine.forward_batch import ForwardBatch
    from engine.model_spec import ModelSpec


class StepRunner(Protocol):
    """`ModelRunner` on CPUs, `CudaModelRunner` on a CUDA device. Lives on the engine thread."""

    spec: ModelSpec
    """Of the whole model."""

    def forward(
        self, batch: ForwardBatch, on_layers: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Logits, float32 [R, vocab]; the KV of every token of the batch is in its slot after.

        The batch is on the host. `on_layers(n)` is called as soon as the KV of layers [0, n) is
        written, for every n but the last.
        """
        ...

    def warm_up(self) -> None:
        """Make the first step as fast as the others. Writes to the dummy page only."""
        ...

    def close(self) -> None:
        """End what the runner has started. From any thread."""
        ...
