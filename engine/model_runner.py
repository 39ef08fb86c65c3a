"""The one object the step loop calls: a loaded model over a worker's KV pool."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch

from engine.attention.cpu import DECODE_QUERIES_MAX, CpuAttention
from engine.attention.metadata import build_attention_metadata
from engine.forward_batch import ForwardBatch
from engine.llama import LlamaDecoder
from engine.model_spec import ModelSpec, load_spec
from engine.operators.native_operators import NativeOperators
from engine.operators.torch_operators import TorchOperators
from engine.weights import load_weights
from kvferry.config import DType
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.operators.interface import Operators
    from mem_cache.kv_pool import KvPool


class ModelRunner:
    """Loads a model directory and computes steps. Lives on the engine thread."""

    spec: ModelSpec

    def __init__(self, directory: Path, kv_pool: KvPool, *, threads: int, dtype: DType) -> None:
        """`threads` compute threads; the setting is the process's, so one runner per process."""
        assert isinstance(kv_pool.layout, KvLayout), "the models of this engine have K and V"
        _set_threads(threads)
        self.spec = load_spec(directory)
        self._kv_pool = kv_pool
        weights = load_weights(directory, dtype)
        attention = CpuAttention(kv_pool, threads, self.spec.sliding_window)
        operators = _choose_operators(dtype, threads)
        self._decoder = LlamaDecoder(self.spec, weights, operators, attention)

    def forward(
        self, batch: ForwardBatch, on_layers: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Logits, float32 [R, vocab]; the KV of every token of the batch is in its slot after.

        `on_layers`: see `LlamaDecoder.forward`.
        """
        return self._decoder.forward(batch, self._kv_pool, on_layers)

    def warm_up(self) -> None:
        """Compile or load the native kernels and touch the weights. Writes to dummy slot 0 only."""
        for tokens in (1, DECODE_QUERIES_MAX + 1):
            self.forward(_dummy_batch(tokens))


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    if threads > 1:
        # The one layer of Numba whose threads sleep while they wait: OpenMP's spin, and take the
        # core from whoever would let them go on. It serves one thread per process: the engine's.
        numba.config.THREADING_LAYER = "workqueue"  # type: ignore[attr-defined]
        # Numba refuses more than the machine has.
        numba.set_num_threads(min(threads, len(os.sched_getaffinity(0))))


def _choose_operators(dtype: DType, threads: int) -> Operators:
    if dtype is DType.FLOAT32:
        return NativeOperators(threads)
    return TorchOperators()


def _dummy_batch(tokens: int) -> ForwardBatch:
    """A sequence all of whose tokens lie in slot 0."""
    req_to_token = np.zeros((1, tokens), dtype=np.int32)
    return ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(tokens),
        out_slots=torch.zeros(tokens, dtype=torch.int64),
        attention=build_attention_metadata(req_to_token, [0], [tokens], [tokens], page_size=1),
        logits_at=torch.tensor([tokens - 1]),
    )
