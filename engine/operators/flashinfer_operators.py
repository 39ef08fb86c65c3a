"""The operators on a CUDA device: FlashInfer's kernels where it has them, torch's for the rest.

They have not run on one (docs/gpu.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.operators.torch_operators import TorchOperators

if TYPE_CHECKING:
    import torch


class FlashInferOperators(TorchOperators):
    """Implements `Operators` for float16 and bfloat16. Sums and norms are computed in float32."""

    def __init__(self, library: Any) -> None:
        """`library`: FlashInfer, or what has its functions."""
        self._library = library

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operators.rms_norm`. Of heads, too: [T, H, D]."""
        out: torch.Tensor = self._library.rmsnorm(inputs.contiguous(), weight, eps)
        return out

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Operators.add_rms_norm`. The result takes the place of `update`."""
        self._library.fused_add_rmsnorm(update, residual, weight, eps)
        return update

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators.silu_and_mul`."""
        out: torch.Tensor = self._library.silu_and_mul(gate_up)
        return out

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators.gelu_tanh_and_mul`."""
        out: torch.Tensor = self._library.gelu_tanh_and_mul(gate_up)
        return out

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        rope: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """See `Operators.rope_and_write`."""
        tokens = len(qkv)
        _, kv_heads, head_dim = keys.shape
        width = kv_heads * head_dim
        query, key, value = qkv[:, : -2 * width], qkv[:, -2 * width : -width], qkv[:, -width:]
        self._library.apply_rope_with_cos_sin_cache_inplace(
            positions, query, key, head_dim, rope, is_neox=True
        )
        keys.index_copy_(0, slots, key.view(tokens, kv_heads, head_dim))
        values.index_copy_(0, slots, value.view(tokens, kv_heads, head_dim))
        return query.contiguous().view(tokens, -1, head_dim)
