"""The operators in plain torch: any device, any dtype. The reference for the native ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from engine.operators.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from engine.operators.quantized_weight import Weight


class TorchOperators:
    """Implements `Operators`. Norms and rotation are computed in float32."""

    def linear(
        self, inputs: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Operators.linear`."""
        if isinstance(weight, QuantizedWeight):
            weight = weight.elements()
        return functional.linear(inputs, weight, bias)

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operators.rms_norm`."""
        wide = inputs.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return weight * (wide * scale).to(inputs.dtype)

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Operators.add_rms_norm`."""
        residual.add_(update)
        return self.rms_norm(residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators.silu_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators.gelu_tanh_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up

    def norm_heads(
        self,
        qkv: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        kv_heads: int,
        eps: float,
    ) -> None:
        """See `Operators.norm_heads`."""
        heads = qkv.view(len(qkv), -1, len(key_weight))
        query_heads = heads.shape[1] - 2 * kv_heads
        queries, keys = heads[:, :query_heads], heads[:, query_heads:-kv_heads]
        queries.copy_(self.rms_norm(queries, query_weight, eps))
        keys.copy_(self.rms_norm(keys, key_weight, eps))

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
        _, kv_heads, head_dim = keys.shape
        heads = qkv.view(len(qkv), -1, head_dim)
        query_heads = heads.shape[1] - 2 * kv_heads
        cosines, sines = rope[positions].chunk(2, dim=-1)
        rotated = _rotate(heads[:, : query_heads + kv_heads], cosines[:, None], sines[:, None])
        keys.index_copy_(0, slots, rotated[:, query_heads:])
        values.index_copy_(0, slots, heads[:, query_heads + kv_heads :])
        return rotated[:, :query_heads].contiguous()


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.cat(
        [first * cosines - second * sines, second * cosines + first * sines], dim=-1
    )
    return rotated.to(heads.dtype)
