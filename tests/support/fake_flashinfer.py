"""What we use of FlashInfer, on the CPU: its contract checked strictly, the numbers in float64.

Facts from FlashInfer's documentation. What a real kernel would do with a broken contract is read
or write somewhere else, so everything that can be checked here is an error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    import pytest

_INT32 = torch.int32
_ELEMENT_TYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 256)
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
_LAYOUTS = ("NHD", "HND")
_GRAPH_BUFFERS = ("indptr", "indices", "last_page_len")


class ContractError(Exception):
    """An argument that FlashInfer does not take. No `ValueError`: nobody may expect it."""


def widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there are kernels for float32, and for heads of any size, so that answers of
    tiny models can be compared token for token. We and the stand-in refuse both otherwise."""
    types, dims = (*_ELEMENT_TYPES, torch.float32), range(1, 257)
    for module in ("engine.attention.flashinfer", __name__):
        monkeypatch.setattr(f"{module}._ELEMENT_TYPES", types)
        monkeypatch.setattr(f"{module}._HEAD_DIMS", dims)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ContractError(problem)


@torch.library.custom_op("kvferry_tests::paged_attention", mutates_args=("out",))
def _paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    out: torch.Tensor,
    window_left: int,
    scale: float,
    cap: float,
) -> None:
    """One opaque kernel, so that a recorded graph runs it on what its tables hold by then.

    keys and values [pages, page_size, H_kv, D].
    """
    page_size = keys.shape[1]
    for i in range(len(last_page_len)):
        rows = slice(int(qo_indptr[i]), int(qo_indptr[i + 1]))
        pages = kv_indices[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
        length = (len(pages) - 1) * page_size + int(last_page_len[i])
        k = keys[pages].flatten(0, 1)[:length].double()
        v = values[pages].flatten(0, 1)[:length].double()
        out[rows] = _attend(q[rows].double(), k, v, window_left, (scale, cap)).to(out.dtype)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_left: int,
    scores_are: tuple[float, float],
) -> torch.Tensor:
    """Causal attention of the last tokens: q [n, H, D], k and v [m, H_kv, D], float64.

    `scores_are`: multiplied by the first, then bounded by the second unless that is 0.
    """
    scale, cap = scores_are
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    at = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))[None]
    hidden = key > at
    if window_left >= 0:
        hidden = hidden | (key < at - window_left)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    # What is not attended to may be anything, NaN too.
    return torch.einsum("hnm,mhd->nhd", weights, v.masked_fill(hidden.all(0)[:, None, None], 0.0))


class _PagedWrapper:
    """What both wrappers have in common."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        _require(workspace.dtype == torch.uint8, "the workspace is bytes")
        _require(workspace.data_ptr() % 16 == 0, "the workspace is aligned")
        _require(kv_layout in _LAYOUTS, f"layout {kv_layout!r}")
        self.device = workspace.device
        self.plans = 0
        self._kv_layout = kv_layout
        self._shape: tuple[int, int, int, int] | None = None

    def _keep(
        self,
        shape: tuple[int, int, int, int],
        options: dict[str, Any],
        tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """`shape`: query heads, KV heads, head_dim, page_size; `tables`: qo_indptr, kv_indptr,
        kv_indices, last_page_len, where the kernel will find them."""
        query_heads, kv_heads, head_dim, page_size = shape
        _require(query_heads % kv_heads == 0, f"{query_heads} heads share {kv_heads}")
        _require(head_dim in _HEAD_DIMS, f"head_dim {head_dim}")
        _require(page_size >= 1, f"page_size {page_size}")
        q_type, kv_type = options["q_data_type"], options["kv_data_type"]
        _require(q_type in _ELEMENT_TYPES, f"q_data_type {q_type}")
        _require(kv_type in _ELEMENT_TYPES, f"kv_data_type {kv_type}")
        _require(options["window_left"] >= -1, f"window_left {options['window_left']}")
        self._scale = 1.0 / math.sqrt(head_dim)
        self._window_left = options["window_left"]
        cap = options["logits_soft_cap"]
        _require(cap is None or cap > 0, f"logits_soft_cap {cap}")
        self._cap = 0.0 if cap is None else cap
        self._types = q_type, kv_type
        self._shape = shape
        self._tables = tables
        used = tables[2][: int(tables[1][-1])]
        # Of the host: `run` may be recorded, and must not look into a table.
        self._rows, self._last_page = int(tables[0][-1]), int(used.max())
        self.plans += 1

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[tokens, query heads, head_dim], as `q` is."""
        _require(self._shape is not None, "plan comes before run")
        assert self._shape is not None
        query_heads, kv_heads, head_dim, page_size = self._shape
        qo_indptr, _, _, last_page_len = self._tables
        _require(q.dim() == 3 and q.shape[1:] == (query_heads, head_dim), f"q {tuple(q.shape)}")
        _require(q.is_contiguous(), "q is not contiguous")
        _require(q.dtype == self._types[0], f"q of {q.dtype}, planned {self._types[0]}")
        _require(q.device == self.device, f"q on {q.device}")
        _require(len(q) == self._rows, f"{len(q)} rows, planned {self._rows}")
        _require(len(last_page_len) == len(qo_indptr) - 1, "tables of different batches")
        page = (page_size, kv_heads) if self._kv_layout == "NHD" else (kv_heads, page_size)
        for cache in paged_kv_cache:
            _require(cache.dim() == 4, "the cache has pages of tokens of heads of elements")
            _require(cache.shape[1:] == (*page, head_dim), f"cache {tuple(cache.shape)}")
            _require(cache.dtype == self._types[1], f"cache of {cache.dtype}")
            _require(cache.is_contiguous(), "the cache is not contiguous")
            _require(cache.device == self.device, f"cache on {cache.device}")
            _require(self._last_page < len(cache), "a page beyond the cache")
        keys, values = paged_kv_cache
        if self._kv_layout == "HND":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        out = torch.empty_like(q)
        scores_are = self._scale, self._cap
        _paged_attention(q, keys, values, *self._tables, out, self._window_left, *scores_are)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    """Any number of new tokens per sequence."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        _require(causal, "ours is causal always")
        tables = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        _check_tables(*tables, page_size)
        _check_indptr(qo_indptr, "qo_indptr")
        _require(len(qo_indptr) == len(paged_kv_indptr), "tables of different batches")
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        _require(bool((qo_indptr.diff() <= lengths).all()), "more new tokens than tokens")
        options = {
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
        }
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        on_device = tuple(table.to(self.device, copy=True) for table in (qo_indptr, *tables))
        self._keep(shape, options, on_device)  # type: ignore[arg-type]


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    """One new token per sequence."""

    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        **buffers: torch.Tensor,
    ) -> None:
        super().__init__(workspace, kv_layout)
        expected = {f"paged_kv_{name}_buffer" for name in _GRAPH_BUFFERS} if use_cuda_graph else ()
        _require(set(buffers) == set(expected), f"buffers {sorted(buffers)}")
        self._tensor_cores = use_tensor_cores
        self._buffers: tuple[torch.Tensor, ...] | None = None
        if use_cuda_graph:
            indptr, indices, last = (buffers[f"paged_kv_{name}_buffer"] for name in _GRAPH_BUFFERS)
            for buffer in (indptr, indices, last):
                _require(buffer.dtype == _INT32 and buffer.device == self.device, "buffers")
            _require(len(indptr) == len(last) + 1, "the buffers are of different batches")
            self._buffers = indptr, indices, last

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        _check_tables(indptr, indices, last_page_len, page_size)
        group = num_qo_heads // num_kv_heads
        _require(self._tensor_cores or group in _CUDA_CORE_GROUPS, f"groups of {group} heads")
        tables = (indptr, indices, last_page_len)
        if self._buffers is None:
            kept = tuple(table.to(self.device, copy=True) for table in tables)
        else:
            _require(len(last_page_len) == len(self._buffers[2]), "the graph is of another size")
            _require(len(indices) <= len(self._buffers[1]), "more pages than the buffer holds")
            for buffer, table in zip(self._buffers, tables, strict=True):
                buffer[: len(table)].copy_(table)
            kept = self._buffers
        options = {
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
        }
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        one_each = torch.arange(len(indptr), dtype=_INT32, device=self.device)
        # The number of sequences never changes where there are buffers, nor do these rows.
        rows = self._tables[0] if self._shape is not None and self._buffers else one_each
        self._keep(shape, options, (rows, *kept))  # type: ignore[arg-type]


def _check_indptr(indptr: torch.Tensor, name: str) -> None:
    _require(indptr.dtype == _INT32, f"{name} of {indptr.dtype}")
    _require(indptr.device.type == "cpu", f"{name} on {indptr.device}: planning reads it")
    _require(indptr.is_contiguous() and int(indptr[0]) == 0, f"{name} begins at 0")
    _require(bool((indptr.diff() >= 1).all()), f"{name} does not ascend")


def _check_tables(
    indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, page_size: int
) -> None:
    _check_indptr(indptr, "indptr")
    for table in (indices, last):
        _require(table.dtype == _INT32 and table.is_contiguous(), "tables are int32")
    _require(len(last) == len(indptr) - 1, "last_page_len of another batch")
    _require(len(indices) == int(indptr[-1]), "indices of another batch")
    _require(int(indices.min()) >= 0, "a page before the first")
    _require(bool(((last >= 1) & (last <= page_size)).all()), f"last_page_len {last.tolist()}")


def _check_rows(inputs: torch.Tensor, weight: torch.Tensor) -> None:
    _require(inputs.dtype in _ELEMENT_TYPES, f"rows of {inputs.dtype}")
    _require(inputs.is_contiguous(), "rows are not contiguous")
    _require(weight.dtype == inputs.dtype, f"a weight of {weight.dtype}")
    _require(weight.shape == inputs.shape[-1:], f"a weight of {tuple(weight.shape)}")


def _normed(inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = inputs.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.double()).to(weight.dtype)


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    _require(input.dim() in (2, 3), f"rows {tuple(input.shape)}")
    _check_rows(input, weight)
    return _normed(input, weight, eps)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
) -> None:
    _require(input.dim() == 2 and input.shape == residual.shape, "rows of different shapes")
    _check_rows(input, weight)
    _check_rows(residual, weight)
    total = residual.double() + input.double()
    residual.copy_(total)
    input.copy_(_normed(total, weight, eps))


def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    gate, up = _halves(input)
    return (functional.silu(gate) * up).to(input.dtype)


def gelu_tanh_and_mul(input: torch.Tensor) -> torch.Tensor:
    gate, up = _halves(input)
    return (functional.gelu(gate, approximate="tanh") * up).to(input.dtype)


def _halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _require(rows.dtype in _ELEMENT_TYPES and rows.is_contiguous(), f"rows of {rows.dtype}")
    _require(rows.shape[-1] * rows.itemsize % 16 == 0, "rows are not whole 16 bytes")
    gate, up = rows.double().chunk(2, -1)
    return gate, up


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    _require(is_neox, "ours rotates halves")
    _require(cos_sin_cache.dtype == torch.float32, "the table is float32")
    _require(cos_sin_cache.is_contiguous(), "the table is not contiguous")
    _require(cos_sin_cache.shape[1] == head_size, "the table is of other heads")
    _require(positions.dtype in (_INT32, torch.int64) and positions.dim() == 1, "positions")
    cos, sin = cos_sin_cache[positions].double()[:, None].chunk(2, -1)
    for rows in (query, key):
        _require(rows.shape[0] == len(positions), "positions of another batch")
        _require(rows.dtype in _ELEMENT_TYPES and rows.stride(-1) == 1, "rows")
        heads = rows.view(len(rows), -1, head_size)
        first, second = heads.double().chunk(2, -1)
        heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))
