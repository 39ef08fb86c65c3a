"""The operators for float32 on a CPU: no dispatch, no intermediate tensors, weights as they lie.

The linear kernel reads a weight in the file's own layout, so that weights stay mapped and shared.
It is as fast as memory or the multipliers allow (docs/decisions/0037-products-on-cpus.md) until
inputs are so many that MKL's blocking pays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from engine.operators import native_kernels, quantized_kernels
from engine.operators.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from engine.crew import Crew
    from engine.operators.quantized_weight import Weight

_LINEAR_TOKENS_MAX = 128
"""Longer inputs go to torch."""


class NativeOperators:
    """Implements `Operators`. Every tensor is contiguous float32 on the CPU."""

    def __init__(self, crew: Crew) -> None:
        self._board = crew.board

    def linear(
        self, inputs: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Operators.linear`."""
        tokens, width = inputs.shape
        if isinstance(weight, QuantizedWeight):
            return self._quantized(inputs, weight, bias)
        if tokens > _LINEAR_TOKENS_MAX:
            return functional.linear(inputs, weight, bias)
        assert inputs.is_contiguous(), "a kernel reads them by their address"
        assert weight.is_contiguous(), "a kernel reads it by its address"
        rows = len(weight)
        out = torch.empty(tokens, rows)
        addresses = inputs.data_ptr(), weight.data_ptr(), out.data_ptr()
        native_kernels.linear(
            self._board, native_kernels.LINEAR_PART, *addresses, tokens, width, rows
        )
        return out if bias is None else out.add_(bias)

    def _quantized(
        self, inputs: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        assert inputs.is_contiguous(), "a kernel reads them by their address"
        tokens, width = inputs.shape
        rows = len(weight)
        out = torch.empty(tokens, rows)
        quantized_kernels.linear(
            self._board,
            quantized_kernels.LINEAR_PART,
            inputs.data_ptr(),
            weight.values.data_ptr(),
            weight.scales.data_ptr(),
            out.data_ptr(),
            tokens,
            width,
            rows,
        )
        return out if bias is None else out.add_(bias)

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operators.rms_norm`."""
        out = torch.empty_like(inputs)
        native_kernels.rms_norm(inputs.numpy(), weight.numpy(), eps, out.numpy())
        return out

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Operators.add_rms_norm`."""
        out = torch.empty_like(residual)
        native_kernels.add_rms_norm(
            residual.numpy(), update.numpy(), weight.numpy(), eps, out.numpy()
        )
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators.silu_and_mul`."""
        tokens, width = gate_up.shape
        out = torch.empty(tokens, width // 2)
        native_kernels.silu_and_mul(gate_up.numpy(), out.numpy())
        return out

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators.gelu_tanh_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def norm_heads(
        self,
        qkv: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        kv_heads: int,
        eps: float,
    ) -> None:
        """See `Operators.norm_heads`."""
        heads = qkv.view(len(qkv), -1, len(key_weight)).numpy()
        native_kernels.norm_heads(heads, query_weight.numpy(), key_weight.numpy(), kv_heads, eps)

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
        heads = qkv.view(tokens, -1, head_dim)
        queries = torch.empty(tokens, heads.shape[1] - 2 * kv_heads, head_dim)
        native_kernels.rope_and_write(
            heads.numpy(),
            rope.numpy(),
            positions.numpy(),
            slots.numpy(),
            keys.numpy(),
            values.numpy(),
            queries.numpy(),
        )
        return queries
