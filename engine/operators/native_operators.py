"""The operators for float32 on a CPU: no dispatch, no intermediate tensors, weights as they lie.

Products read a weight in the file's own layout, so that weights stay mapped and shared, and are as
fast as memory or the multipliers allow (docs/decisions/0037-products-on-cpus.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.operators import native_kernels, panel_kernels, quantized_kernels, token_kernels
from engine.operators.native_kernels import DOT_TOKENS_MAX
from engine.operators.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from engine.crew import Crew
    from engine.operators.quantized_weight import Weight


class NativeOperators:
    """Implements `Operators`. Every tensor is contiguous float32 on the CPU."""

    def __init__(self, crew: Crew) -> None:
        self._board = crew.board

    def linear(
        self, inputs: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Operators.linear`."""
        assert inputs.is_contiguous(), "a kernel reads them by their address"
        tokens, width = inputs.shape
        if isinstance(weight, QuantizedWeight):
            out = torch.empty(tokens, len(weight))
            addresses = (
                inputs.data_ptr(),
                weight.values.data_ptr(),
                weight.scales.data_ptr(),
                out.data_ptr(),
            )
            few, many = quantized_kernels.LINEAR_PART, quantized_kernels.PACKED_PART
            part = few if tokens <= DOT_TOKENS_MAX else many
            quantized_kernels.linear(self._board, part, *addresses, tokens, width, len(weight))
        else:
            assert weight.is_contiguous(), "a kernel reads it by its address"
            rows = weight.shape[0]
            out = torch.empty(tokens, rows)
            kernels = native_kernels if tokens <= DOT_TOKENS_MAX else panel_kernels
            arrays = inputs.data_ptr(), weight.data_ptr(), out.data_ptr()
            kernels.linear(self._board, kernels.LINEAR_PART, *arrays, tokens, width, rows)
        return out if bias is None else out.add_(bias)

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operators.rms_norm`."""
        assert inputs.is_contiguous(), "a kernel reads them by their address"
        tokens, width = inputs.shape
        out = torch.empty(tokens, width)
        addresses = inputs.data_ptr(), weight.data_ptr(), out.data_ptr()
        part = token_kernels.RMS_NORM_PART
        token_kernels.rms_norm(self._board, part, *addresses, tokens, width, eps)
        return out

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Operators.add_rms_norm`."""
        assert residual.is_contiguous(), "a kernel changes it by its address"
        assert update.is_contiguous(), "a kernel reads it by its address"
        tokens, width = residual.shape
        out = torch.empty(tokens, width)
        addresses = residual.data_ptr(), update.data_ptr(), weight.data_ptr(), out.data_ptr()
        part = token_kernels.ADD_RMS_NORM_PART
        token_kernels.add_rms_norm(self._board, part, *addresses, tokens, width, eps)
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators.silu_and_mul`."""
        return self._gate(gate_up, token_kernels.SILU_PART)

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators.gelu_tanh_and_mul`."""
        return self._gate(gate_up, token_kernels.GELU_PART)

    def _gate(self, gate_up: torch.Tensor, part: int) -> torch.Tensor:
        assert gate_up.is_contiguous(), "a kernel reads it by its address"
        tokens, width = gate_up.shape
        out = torch.empty(tokens, width // 2)
        addresses = gate_up.data_ptr(), out.data_ptr()
        token_kernels.gate(self._board, part, *addresses, tokens, width // 2)
        return out

    def norm_heads(
        self,
        qkv: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        kv_heads: int,
        eps: float,
    ) -> None:
        """See `Operators.norm_heads`."""
        assert qkv.is_contiguous(), "a kernel changes it by its address"
        tokens, width = qkv.shape
        head_dim = key_weight.shape[0]
        addresses = qkv.data_ptr(), query_weight.data_ptr(), key_weight.data_ptr()
        sizes = tokens, width // head_dim, kv_heads, head_dim
        part = token_kernels.NORM_HEADS_PART
        token_kernels.norm_heads(self._board, part, *addresses, *sizes, eps)

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
        assert qkv.is_contiguous(), "a kernel reads it by its address"
        assert keys.is_contiguous(), "a kernel writes slots by their address"
        assert values.is_contiguous(), "a kernel writes slots by their address"
        tokens, width = qkv.shape
        _, kv_heads, head_dim = keys.shape
        num_heads = width // head_dim - 2 * kv_heads
        queries = torch.empty(tokens, num_heads, head_dim)
        token_kernels.rope_and_write(
            self._board,
            token_kernels.ROPE_PART,
            qkv.data_ptr(),
            rope.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            queries.data_ptr(),
            tokens,
            num_heads,
            kv_heads,
            head_dim,
        )
        return queries
