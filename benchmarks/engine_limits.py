"""What a step cannot be faster than, measured like an engine: in turns with them, in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from benchmarks.engine_contenders import timed
from engine.crew import Crew, share
from engine.model_spec import load_spec
from engine.native_math import I64, kernel, task
from engine.native_memory import array_at
from engine.weights import load_weights
from kvferry.config import DType, KvDType

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PART_ELEMENTS = 2**18
"""A megabyte: a long stream."""
_RATE_TOKENS = 512
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
    """Prefill: the products alone, as torch computes them. Decode: memory or products, the slower.

    The products are those of the prompt's tokens with the matrices of the layers, and of its last
    token with the head; attention's are left out. A decode step reads every weight and the KV of
    every sequence once, and its products are as many operations as they are, at the rate of the
    largest product of a layer with `_RATE_TOKENS` tokens: small ones reach less, with any library.
    """

    name = "limit"

    def __init__(self, directory: Path, threads: int) -> None:
        """`directory`: of a Llama."""
        spec, weights = load_spec(directory), load_weights(directory, DType.FLOAT32)
        self._crew = Crew(threads)
        self._kv_bytes_per_token = spec.kv_layout(KvDType.FLOAT32, 1).bytes_per_token
        self._head = weights.tensor("model.embed_tokens.weight")
        self._matrices = [
            weights.fused([f"model.layers.{layer}.{name}_proj.weight" for name in names])
            for layer in range(spec.num_layers)
            for names in _PRODUCTS
        ]

    def prefill(self, tokens: int) -> Callable[[], float]:
        """See `Contender.prefill`."""
        inputs = {m.shape[1]: torch.randn(tokens, m.shape[1]) for m in self._matrices}

        @torch.inference_mode()
        def step() -> None:
            for matrix in self._matrices:
                functional.linear(inputs[matrix.shape[1]], matrix)
            functional.linear(inputs[self._head.shape[1]][-1:], self._head)

        return timed(step)

    def decode(self, batch: int, context: int) -> Callable[[], float]:
        """See `Contender.decode`."""
        kv = torch.ones(batch * context * self._kv_bytes_per_token // 4)
        reads = [self._arguments(data) for data in [*self._matrices, self._head, kv]]
        largest = max(self._matrices, key=lambda matrix: matrix.numel())
        inputs = torch.randn(_RATE_TOKENS, largest.shape[1])
        # Both in multiply-adds.
        wanted = batch * (sum(matrix.numel() for matrix in self._matrices) + self._head.numel())
        done = _RATE_TOKENS * largest.numel()

        def read() -> None:
            for arguments, _ in reads:
                _read(self._crew.board, _read_part.address, arguments)

        @torch.inference_mode()
        def multiply() -> None:
            functional.linear(inputs, largest)

        memory, product = timed(read), timed(multiply)
        return lambda: max(memory(), wanted / done * product())

    def _arguments(self, data: torch.Tensor) -> tuple[I64, tuple[torch.Tensor, ...]]:
        """Of the task, and the memory that they point to."""
        sums = torch.empty(-(-data.numel() // _PART_ELEMENTS))
        return np.array([data.data_ptr(), data.numel(), sums.data_ptr()]), (data, sums)
