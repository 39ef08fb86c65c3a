"""What a decoder needs besides attention. Called per layer, on the engine thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from engine.operators.quantized_weight import Weight


class Operators(Protocol):
    """Shapes: T tokens, `hidden` features. Tensors are contiguous.

    Results are new tensors unless a method says that it changes one in place.
    """

    def linear(
        self, inputs: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, in] times weight [out, in], plus bias [out] -> [T, out].

        A quantized weight needs float32 inputs.
        """
        ...

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[T, hidden] over the root mean square of each row, times weight [hidden]."""
        ...

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `update` to `residual` in place; the norm of the sum."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu of the first half of each row times the second: [T, 2 m] -> [T, m]."""
        ...

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `silu_and_mul` with GELU, in its approximation by tanh."""
        ...

    def norm_heads(
        self,
        qkv: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        kv_heads: int,
        eps: float,
    ) -> None:
        """`rms_norm` of each head of q and of k by itself, in place.

        qkv [T, (H + 2 H_kv) D] as `rope_and_write` takes it; weights [D].
        """
        ...

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        rope: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate q and k, write k and v to their slots; the queries [T, H, D].

        qkv [T, (H + 2 H_kv) D], which may be overwritten; rope [context, D] (see
        `engine.rope.rope_table`); positions and slots int64 [T]; keys and values are one layer's
        pool buffers [N_slot, H_kv, D], changed in place.
        """
        ...
