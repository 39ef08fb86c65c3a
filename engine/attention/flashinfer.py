"""Attention on a CUDA device by FlashInfer's paged wrappers. It has not run on one (docs/gpu.md).

A wrapper is told of a step once (`plan`, from arrays on the host) and run in every layer. Sequences
with one new token go to the decode wrapper, the others to the prefill wrapper. A plan is of use
until the backend makes its next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.attention.metadata import AttentionMetadata
from kvferry.errors import ConfigError
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mem_cache.kv_pool import KvPool

WORKSPACE_BYTES = 128 * 2**20
"""For partial results of sequences that several blocks share; FlashInfer's advice. One for all
wrappers of a worker, which run one after the other."""
_HEAD_DIMS = (64, 128, 256)
_ELEMENT_TYPES = (torch.float16, torch.bfloat16)
_TENSOR_CORES_FROM = 4
"""Query heads per KV head from which decoding by matrix instructions pays; the other kernel is
made for some smaller numbers only."""
_EVERYTHING = -1
"""FlashInfer's word for no window."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedHeads:
    """What every wrapper of a worker is told: the library, the pool, and the queries' heads."""

    library: Any
    """FlashInfer, or what has its functions."""
    kv_pool: KvPool
    query_heads: int
    dtype: torch.dtype
    """Of queries and answers."""
    workspace: torch.Tensor
    """uint8 [WORKSPACE_BYTES], on the device."""
    score_cap: float | None = None
    """c: scores x become c tanh(x / c)."""

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.head_dim not in _HEAD_DIMS:
            problem = f"has heads of {layout.head_dim}; on cuda they must have 64, 128 or 256"
            raise ConfigError("model.path", problem)
        if self.dtype not in _ELEMENT_TYPES:
            problem = f"is {self.dtype}; on cuda it must be float16 or bfloat16"
            raise ConfigError("model.dtype", problem)
        if self.kv_pool.buffer.dtype != self.dtype:
            problem = f"is {layout.dtype.value}; on cuda it must be the model's"
            raise ConfigError("cache.dtype", problem)

    @property
    def layout(self) -> KvLayout:
        """How the pool stores K and V."""
        layout = self.kv_pool.layout
        assert isinstance(layout, KvLayout), "our models have K and V"
        return layout

    @property
    def arrangement(self) -> str:
        """FlashInfer's name of it."""
        return self.layout.arrangement.value.upper()

    @property
    def decodes_on_tensor_cores(self) -> bool:
        """Which of two decode kernels is used."""
        return self.query_heads // self.layout.num_kv_heads >= _TENSOR_CORES_FROM

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of a layer, page by page: [pages, page_size, H_kv, D] or, head by
        head, [pages, H_kv, page_size, D]."""
        keys, values = self.kv_pool.layer(layer)
        shape = (-1, self.layout.page_size, *keys.shape[-2:])
        return (
            (keys, values) if self.arrangement == "HND" else (keys.view(shape), values.view(shape))
        )

    def plan_decode(self, wrapper: Any, metadata: AttentionMetadata, window: int | None) -> None:
        """Tell a decode wrapper of sequences with one new token each."""
        wrapper.plan(
            torch.from_numpy(metadata.kv_indptr),
            torch.from_numpy(metadata.kv_indices),
            torch.from_numpy(metadata.kv_last_page_len),
            self.query_heads,
            self.layout.num_kv_heads,
            self.layout.head_dim,
            self.layout.page_size,
            **self._options(window),
        )

    def plan_prefill(self, wrapper: Any, metadata: AttentionMetadata, window: int | None) -> None:
        """Tell a prefill wrapper of sequences with any number of new tokens each."""
        wrapper.plan(
            torch.from_numpy(metadata.qo_indptr),
            torch.from_numpy(metadata.kv_indptr),
            torch.from_numpy(metadata.kv_indices),
            torch.from_numpy(metadata.kv_last_page_len),
            self.query_heads,
            self.layout.num_kv_heads,
            self.layout.head_dim,
            self.layout.page_size,
            causal=True,
            **self._options(window),
        )

    def _options(self, window: int | None) -> dict[str, Any]:
        return {
            # FlashInfer counts the tokens before the query's own.
            "window_left": _EVERYTHING if window is None else window - 1,
            "logits_soft_cap": self.score_cap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


class FlashInferAttention:
    """Implements `AttentionBackend` for any step, kernel by kernel.

    `window`: how many tokens, itself included, each token attends to; None: all up to itself.
    """

    def __init__(self, heads: PagedHeads, window: int | None = None) -> None:
        self._heads = heads
        self._window = window
        library, place = heads.library, (heads.workspace, heads.arrangement)
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(*place)
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(
            *place, use_tensor_cores=heads.decodes_on_tensor_cores
        )

    def plan(self, metadata: AttentionMetadata) -> OneWrapperPlan | MixedPlan:
        """See `AttentionBackend.plan`."""
        is_decoded = metadata.query_lengths == 1
        decoded, others = np.flatnonzero(is_decoded), np.flatnonzero(~is_decoded)
        if len(others) == 0:
            self._heads.plan_decode(self._decode, metadata, self._window)
            return OneWrapperPlan(self._heads, self._decode)
        if len(decoded) == 0:
            self._heads.plan_prefill(self._prefill, metadata, self._window)
            return OneWrapperPlan(self._heads, self._prefill)
        self._heads.plan_decode(self._decode, sequences_of(metadata, decoded), self._window)
        self._heads.plan_prefill(self._prefill, sequences_of(metadata, others), self._window)
        device = self._heads.kv_pool.buffer.device
        parts = [
            (torch.from_numpy(rows_of(metadata, sequences)).to(device), wrapper)
            for sequences, wrapper in ((decoded, self._decode), (others, self._prefill))
        ]
        return MixedPlan(self._heads, parts)


class OneWrapperPlan:
    """Implements `AttentionPlan`: all sequences are of one kind."""

    def __init__(self, heads: PagedHeads, wrapper: Any) -> None:
        """`wrapper`: was told of the step."""
        self._heads = heads
        self._wrapper = wrapper

    def run(self, queries: torch.Tensor, layer: int) -> torch.Tensor:
        """See `AttentionPlan.run`."""
        out: torch.Tensor = self._wrapper.run(queries, self._heads.pages(layer))
        return out.view(len(queries), -1)


class MixedPlan:
    """Implements `AttentionPlan`: some sequences are decoded, some are prompts."""

    def __init__(self, heads: PagedHeads, parts: Sequence[tuple[torch.Tensor, Any]]) -> None:
        """`parts`: rows of the queries, int64 on the device, and the wrapper that was told of
        their sequences."""
        self._heads = heads
        self._parts = parts

    def run(self, queries: torch.Tensor, layer: int) -> torch.Tensor:
        """See `AttentionPlan.run`."""
        pages, out = self._heads.pages(layer), torch.empty_like(queries)
        for rows, wrapper in self._parts:
            out.index_copy_(0, rows, wrapper.run(queries.index_select(0, rows), pages))
        return out.view(len(queries), -1)


class StaticDecodeAttention:
    """Implements `AttentionBackend` for decode steps of one size, for a CUDA Graph.

    The page tables of every step lie at the same addresses, where a captured kernel looks for them.
    """

    def __init__(
        self, heads: PagedHeads, window: int | None, sequences: int, pages_max: int
    ) -> None:
        """`pages_max`: of all sequences of a step together, shared ones counted each time."""
        self._heads = heads
        self._window = window

        def table(entries: int) -> torch.Tensor:
            return torch.zeros(entries, dtype=torch.int32, device=heads.workspace.device)

        self._decode = heads.library.BatchDecodeWithPagedKVCacheWrapper(
            heads.workspace,
            heads.arrangement,
            use_cuda_graph=True,
            use_tensor_cores=heads.decodes_on_tensor_cores,
            paged_kv_indptr_buffer=table(sequences + 1),
            paged_kv_indices_buffer=table(pages_max),
            paged_kv_last_page_len_buffer=table(sequences),
        )

    def plan(self, metadata: AttentionMetadata) -> OneWrapperPlan:
        """See `AttentionBackend.plan`. Of exactly so many sequences, with one new token each."""
        self._heads.plan_decode(self._decode, metadata, self._window)
        return OneWrapperPlan(self._heads, self._decode)


def rows_of(metadata: AttentionMetadata, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
    """The batch's rows of these sequences' new tokens, in their order."""
    return _ranges(metadata.qo_indptr, sequences)


def sequences_of(metadata: AttentionMetadata, sequences: NDArray[np.int64]) -> AttentionMetadata:
    """The same of some sequences, whose new tokens are rows one after the other."""
    return AttentionMetadata(
        qo_indptr=_indptr(metadata.query_lengths[sequences]),
        kv_indptr=_indptr(np.diff(metadata.kv_indptr)[sequences]),
        kv_indices=metadata.kv_indices[_ranges(metadata.kv_indptr, sequences)],
        kv_last_page_len=metadata.kv_last_page_len[sequences],
        page_size=metadata.page_size,
    )


def _ranges(indptr: NDArray[np.int32], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every place of the chosen of the ranges that `indptr` bounds."""
    return np.concatenate([np.arange(indptr[i], indptr[i + 1], dtype=np.int64) for i in chosen])


def _indptr(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
