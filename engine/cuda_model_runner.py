"""A loaded model on a CUDA device. It has not run on one (docs/gpu.md).

The same decoder as on a CPU, with FlashInfer's attention and operators. A decode step is a CUDA
Graph where one was recorded for its size. `forward` returns when the device has done the step, so
that whoever is told of the KV of a token, here or on a link's thread, may read it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from engine.attention.flashinfer import (
    WORKSPACE_BYTES,
    FlashInferAttention,
    PagedHeads,
    StaticDecodeAttention,
)
from engine.attention.layered import LayeredAttention
from engine.cuda_device import CudaDevice
from engine.cuda_graphs import DecodeGraphs, PreparedAttention, StepParts, graph_sizes
from engine.decoder import Decoder
from engine.flashinfer_library import load_flashinfer
from engine.forward_batch import ForwardBatch, dummy_batch
from engine.lora_weights import NO_ADAPTERS
from engine.model_spec import ModelSpec, load_spec
from engine.operators.flashinfer_operators import FlashInferOperators
from engine.tensor_parallel import SoleRank
from engine.weights import load_weights
from mem_cache.element_codec import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from engine.attention.backend import AttentionBackend
    from engine.cuda_device import Device, Mark
    from engine.lora_weights import LoraAdapters
    from kvferry.config import DType
    from mem_cache.kv_pool import KvPool

_WARM_UP_TOKENS = (1, 16)


class CudaModelRunner:
    """Implements `StepRunner`. Lives on the engine thread."""

    spec: ModelSpec

    def __init__(
        self,
        directory: Path,
        kv_pool: KvPool,
        dtype: DType,
        sizes: Sequence[int],
        device: Device,
        library: Any,
        adapters: LoraAdapters = NO_ADAPTERS,
    ) -> None:
        """`sizes`: of the decode steps that become CUDA Graphs, see `DecodeGraphs`. `adapters`: of
        this model, in `dtype` on the device.

        `library`: FlashInfer. Raises `ConfigError` for a model or a type it has no kernels for.
        """
        self.spec = spec = load_spec(directory)
        self._kv_pool = kv_pool
        self._device = device
        heads = PagedHeads(
            library=library,
            kv_pool=kv_pool,
            query_heads=spec.num_heads,
            dtype=torch_dtype(dtype),
            workspace=torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device.name),
            score_cap=spec.scales.score_cap,
        )
        self._attention = self._layered(lambda window: FlashInferAttention(heads, window))
        self._prepared = PreparedAttention()
        weights = load_weights(directory, dtype, device.name)
        operators = FlashInferOperators(library)
        self._decoder = Decoder(spec, weights, operators, self._prepared, SoleRank(), adapters)
        page_size = kv_pool.layout.page_size
        pages_of_one = -(-spec.context_length // page_size)

        def static(sequences: int) -> AttentionBackend:
            pages = sequences * pages_of_one
            return self._layered(
                lambda window: StaticDecodeAttention(heads, window, sequences, pages)
            )

        parts = StepParts(device, self._prepared, self._compute, static, page_size)
        # How many tokens an expert gets is known to the host only by asking the device.
        self._graphs = DecodeGraphs(parts, sizes if spec.experts is None else ())

    def forward(
        self, batch: ForwardBatch, on_layers: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """See `StepRunner.forward`. The logits are on the device."""
        logits = self._graphs.forward(batch) if on_layers is None else None
        marks: list[tuple[int, Mark]] = []
        if logits is None:
            note = None if on_layers is None else lambda n: marks.append((n, self._device.mark()))
            self._prepared.use(self._attention.plan(batch.attention))
            logits = self._compute(self._placed(batch), note)
        end = self._device.mark()
        # The device is told of all layers long before it has computed the first.
        for layers, mark in marks:
            assert on_layers is not None, "nobody else asks for marks"
            mark.wait()
            on_layers(layers)
        end.wait()
        return logits

    def warm_up(self) -> None:
        """Load the kernels, and record the graphs. Writes to the dummy page only."""
        for tokens in _WARM_UP_TOKENS:
            self.forward(dummy_batch(tokens, self._kv_pool.layout.page_size))
        self._graphs.capture()

    def close(self) -> None:
        """Nothing is left to end."""

    def _compute(
        self, batch: ForwardBatch, on_layers: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        return self._decoder.forward(batch, self._kv_pool, on_layers)

    def _placed(self, batch: ForwardBatch) -> ForwardBatch:
        """The same on the device; page tables stay on the host, where they are planned from."""
        host = (batch.token_ids, batch.positions, batch.out_slots, batch.logits_at)
        token_ids, positions, out_slots, logits_at = self._device.upload(host)
        return replace(
            batch,
            token_ids=token_ids,
            positions=positions,
            out_slots=out_slots,
            logits_at=logits_at,
        )

    def _layered(self, make: Callable[[int | None], AttentionBackend]) -> AttentionBackend:
        """One backend for each window of the model's layers."""
        windows = self.spec.windows
        backends = {window: make(window) for window in dict.fromkeys(windows)}
        return LayeredAttention([backends[window] for window in windows])


def build_cuda_runner(
    directory: Path,
    kv_pool: KvPool,
    dtype: DType,
    running_max: int,
    adapters: LoraAdapters = NO_ADAPTERS,
) -> CudaModelRunner:
    """With graphs for up to `running_max` sequences. Raises `ConfigError` for what is missing."""
    device = CudaDevice()
    return CudaModelRunner(
        directory, kv_pool, dtype, graph_sizes(running_max), device, load_flashinfer(), adapters
    )
