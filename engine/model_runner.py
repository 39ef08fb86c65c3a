"""The one object the step loop calls: a loaded model over a worker's KV pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.attention.cpu import DECODE_QUERIES_MAX, CpuAttention
from engine.attention.layered import LayeredAttention
from engine.attention.vectors import FORMS
from engine.crew import Crew
from engine.decoder import Decoder
from engine.forward_batch import dummy_batch
from engine.kernel_set import KernelSet
from engine.layer_spec import Activation
from engine.lora_weights import NO_ADAPTERS
from engine.model_spec import ModelSpec, load_spec
from engine.operators.native_operators import NativeOperators
from engine.operators.torch_operators import TorchOperators
from engine.tensor_parallel_group import RankGroup
from engine.weights import load_weights
from kvferry.config import DType, Quantization
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.attention.backend import AttentionBackend
    from engine.forward_batch import ForwardBatch
    from engine.lora_weights import LoraAdapters
    from engine.operators.interface import Operators
    from engine.tensor_parallel import Collective
    from mem_cache.kv_pool import KvPool


class ModelRunner:
    """Loads a model directory and computes steps. Lives on the engine thread."""

    spec: ModelSpec
    """Of the whole model."""

    def __init__(
        self,
        directory: Path,
        *kv_pools: KvPool,
        threads: int,
        dtype: DType,
        adapters: LoraAdapters = NO_ADAPTERS,
        quantization: Quantization = Quantization.NONE,
    ) -> None:
        """`kv_pools`: one per tensor-parallel rank. `adapters`: of this model, in `dtype`.

        `threads` compute threads; torch's own number of them is the process's, so one runner per
        process. Several ranks compute on one thread each.
        """
        layouts = [pool.layout for pool in kv_pools]
        assert all(isinstance(layout, KvLayout) for layout in layouts), "our models have K and V"
        assert threads == 1 or len(kv_pools) == 1, "several ranks, each on several threads"
        torch.set_num_threads(threads)
        self.crew = Crew(threads)
        """Of the engine thread, which may share other work with it between two steps."""
        self.spec = load_spec(directory)
        rank_spec = self.spec.of_rank(len(kv_pools), "tensor_parallel")
        weights = load_weights(directory, dtype, quantization=quantization)
        self._kernels = KernelSet(
            form=FORMS[layouts[0].dtype],
            is_float32=dtype is DType.FLOAT32,
            is_quantized=quantization is not Quantization.NONE,
            gelu=self.spec.activation is Activation.GELU_TANH,
            head_norms=self.spec.norms.per_head,
        )

        def build(collective: Collective) -> _RankModel:
            kv_pool = kv_pools[collective.shard.rank]
            attention = _choose_attention(kv_pool, self.crew, rank_spec)
            operators = _choose_operators(dtype, self.crew)
            decoder = Decoder(rank_spec, weights, operators, attention, collective, adapters)
            return _RankModel(decoder, kv_pool)

        self._ranks = RankGroup(len(kv_pools), build)
        weights.release()

    def forward(
        self, batch: ForwardBatch, on_layers: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Logits, float32 [R, vocab]; the KV of every token of the batch is in its slot after.

        `on_layers`: see `Decoder.forward`. Raises `InternalError` if a rank has failed; the
        runner is of no use then.
        """
        return self._ranks.forward(batch, on_layers)

    def warm_up(self) -> None:
        """Compile or load the native kernels and touch the weights. Writes to dummy slot 0 only."""
        self._kernels.compile_all()
        for tokens in (1, DECODE_QUERIES_MAX + 1):
            self.forward(dummy_batch(tokens, page_size=1))

    def close(self) -> None:
        """End the threads of the other ranks and of the crew, if there are any. From any thread."""
        self._ranks.close()
        self.crew.close()


class _RankModel:
    """Implements `RankModel`."""

    def __init__(self, decoder: Decoder, kv_pool: KvPool) -> None:
        self._decoder = decoder
        self._kv_pool = kv_pool

    def forward(self, batch: ForwardBatch, on_layers: Callable[[int], None] | None) -> torch.Tensor:
        """See `RankModel.forward`."""
        return self._decoder.forward(batch, self._kv_pool, on_layers)

    def follow(self, batch: ForwardBatch) -> None:
        """See `RankModel.follow`."""
        self._decoder.follow(batch, self._kv_pool)


def _choose_attention(kv_pool: KvPool, crew: Crew, spec: ModelSpec) -> AttentionBackend:
    cap = spec.scales.score_cap
    backends = {window: CpuAttention(kv_pool, crew, window, cap) for window in spec.windows}
    return LayeredAttention([backends[window] for window in spec.windows])


def _choose_operators(dtype: DType, crew: Crew) -> Operators:
    if dtype is DType.FLOAT32:
        return NativeOperators(crew)
    return TorchOperators()
