"""What a step cannot be faster than, measured like an engine: in turns with them, in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from engine.crew import Crew, share
from engine.model_spec import load_spec
from engine.native_math import I64, kernel, task
from engine.native_memory import array_at
from engine.weights import load_weights
from kvferry.config import DType

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PART_ELEMENTS = 2**18
"""A megabyte: a long stream."""
_PRODUCTS = (
    ("self_attn.q", "self_attn.k", "self_attn.v"),
    ("self_attn.o",),
    ("mlp.gate", "mlp.up"),
    ("mlp.down",),
)
"""Of a layer; those of one input are one product."""


@task
def _read_part(arguments: int, index: int) -> int:
    data, elements, sums = array_at(arguments, 3, np.int64)
    start = index * _PART_ELEMENTS
    part = array_at(data + 4 * start, min(_PART_ELEMENTS, elements - start), np.float32)
    total = np.float32(0)
    for k in range(len(part)):
        total += part[k]
    # Stored, so that the reading cannot be left out.
    array_at(sums + 4 * index, 1, np.float32)[0] = total
    return 0


@kernel
def _read(board: int, part: int, arguments: I64) -> None:
    share(board, part, arguments, (arguments[1] + _PART_ELEMENTS - 1) // _PART_ELEMENTS)


class Limits:
    """Decode: reading every weight once. Prefill: the products alone, as torch computes them.

    The products are those of the prompt's tokens with the matrices of the layers, and of its last
    token with the head; attention's are left out.
    """

    name = "limit"

    def __init__(self, directory: Path, threads: int) -> None:
        """`directory`: of a Llama."""
        spec, weights = load_spec(directory), load_weights(directory, DType.FLOAT32)
        self._crew = Crew(threads)
        self._head = weights.tensor("model.embed_tokens.weight")
        self._matrices = [
            weights.fused([f"model.layers.{layer}.{name}_proj.weight" for name in names])
            for layer in range(spec.num_layers)
            for names in _PRODUCTS
        ]

    def prefill(self, tokens: int) -> Callable[[], None]:
        """See `Contender.prefill`."""
        inputs = {m.shape[1]: torch.randn(tokens, m.shape[1]) for m in self._matrices}

        @torch.inference_mode()
        def step() -> None:
            for matrix in self._matrices:
                functional.linear(inputs[matrix.shape[1]], matrix)
            functional.linear(inputs[self._head.shape[1]][-1:], self._head)

        return step

    def decode(self, batch: int, context: int) -> Callable[[], None]:
        """See `Contender.decode`; whatever the batch and the context."""
        assert batch >= 1
        assert context >= 0
        reads = [self._arguments(matrix) for matrix in [*self._matrices, self._head]]

        def step() -> None:
            for arguments, _ in reads:
                _read(self._crew.board, _read_part.address, arguments)

        return step

    def _arguments(self, matrix: torch.Tensor) -> tuple[I64, torch.Tensor]:
        """Of the task, and the memory that they point to."""
        sums = torch.empty(-(-matrix.numel() // _PART_ELEMENTS))
        return np.array([matrix.data_ptr(), matrix.numel(), sums.data_ptr()]), sums
