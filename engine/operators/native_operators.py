"""The operators for float32 on a CPU: no dispatch, no intermediate tensors, weights as they lie.

Products read a weight in the file's own layout, so that weights stay mapped and shared, and are as
fast as memory or the multipliers allow (docs/decisions/0037-products-on-cpus.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.crew import share_words
from engine.operators import native_kernels, panel_kernels, quantized_kernels, token_kernels
from engine.operators.native_kernels import DOT_TOKENS_MAX, rows_of_part
from engine.operators.panel_kernels import PART_ROWS
from engine.operators.quantized_weight import QuantizedWeight
from engine.operators.token_kernels import as_word, parts_of

if TYPE_CHECKING:
    from engine.crew import Crew
    from engine.native_math import Task
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
        rows = len(weight)
        out = torch.empty(tokens, rows)
        addresses: tuple[int, ...]
        if isinstance(weight, QuantizedWeight):
            few, many = quantized_kernels.linear_part, quantized_kernels.packed_part
            addresses = weight.values.data_ptr(), weight.scales.data_ptr()
        else:
            assert weight.is_contiguous(), "a kernel reads it by its address"
            few, many = native_kernels.linear_part, panel_kernels.linear_part
            addresses = (weight.data_ptr(),)
        task, part_rows = (
            (few, rows_of_part(width)) if tokens <= DOT_TOKENS_MAX else (many, PART_ROWS)
        )
        share_words(
            self._board,
            task.address,
            -(-rows // part_rows),
            inputs.data_ptr(),
            *addresses,
            out.data_ptr(),
            tokens,
            width,
            rows,
            part_rows,
        )
        return out if bias is None else out.add_(bias)

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operators.rms_norm`."""
        assert inputs.is_contiguous(), "a kernel reads them by their address"
        tokens, width = inputs.shape
        out = torch.empty(tokens, width)
        addresses = inputs.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._share(
            token_kernels.rms_norm_part, tokens, width, *addresses, tokens, width, as_word(eps)
        )
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
        self._share(
            token_kernels.add_rms_norm_part, tokens, width, *addresses, tokens, width, as_word(eps)
        )
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators.silu_and_mul`."""
        return self._gate(gate_up, token_kernels.silu_part)

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators.gelu_tanh_and_mul`."""
        return self._gate(gate_up, token_kernels.gelu_part)

    def _gate(self, gate_up: torch.Tensor, part: Task) -> torch.Tensor:
        assert gate_up.is_contiguous(), "a kernel reads it by its address"
        tokens, width = gate_up.shape
        out = torch.empty(tokens, width // 2)
        half = width // 2
        self._share(part, tokens, half, gate_up.data_ptr(), out.data_ptr(), tokens, half)
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
        self._share(token_kernels.norm_heads_part, tokens, width, *addresses, *sizes, as_word(eps))

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
        self._share(
            token_kernels.rope_part,
            tokens,
            width,
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

    def _share(self, part: Task, tokens: int, width: int, *words: int) -> None:
        """Work on each of `tokens`, of `width` elements."""
        share_words(self._board, part.address, parts_of(tokens, width), *words)
