"""The operators for float32 on a CPU: no dispatch, no intermediate tensors, weights as they lie.

The linear kernel reads a weight in the file's own layout, so that weights stay mapped and shared.
Measured (docs/decisions/0002-own-decoder.md) it is as fast as prepacked oneDNN up to 16 tokens; for
long inputs MKL is faster, so those go to torch.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.operators import native_kernels

_LINEAR_TOKENS_MAX = 32
"""Longer inputs go to torch."""
_PARALLEL_WORK_MIN = 2**18
"""Multiplications below which handing out work costs more than it saves."""


class NativeOperators:
    """Implements `Operators`. Every tensor is contiguous float32 on the CPU."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def linear(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Operators.linear`."""
        tokens = inputs.shape[0]
        if tokens > _LINEAR_TOKENS_MAX:
            return functional.linear(inputs, weight, bias)
        rows = weight.shape[0]
        out = torch.empty(tokens, rows)
        arrays = inputs.numpy(), weight.numpy(), out.numpy()
        if self._threads > 1 and tokens * weight.numel() >= _PARALLEL_WORK_MIN:
            native_kernels.linear_parallel(*arrays, self._threads)
        else:
            native_kernels.linear_part(*arrays, 0, rows)
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
