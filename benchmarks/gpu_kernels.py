"""Every kernel that a model on a CUDA device calls, against float64. Part of `gpu_check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from engine.attention.flashinfer import (
    WORKSPACE_BYTES,
    FlashInferAttention,
    PagedHeads,
    StaticDecodeAttention,
)
from engine.attention.metadata import build_attention_metadata
from engine.operators.flashinfer_operators import FlashInferOperators
from kvferry.config import KvArrangement, KvDType
from mem_cache.element_codec import torch_dtype
from mem_cache.layout import KvLayout
from mem_cache.pool_choice import build_kv_pool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.gpu_check import Platform
    from engine.attention.metadata import AttentionMetadata

HEAD_DIM = 64
_EPS = 1e-5
_ROUNDINGS = 4
"""Of the kernel's element type, relative to the largest number of a result, that are allowed."""
_DECODES = [(1, 17), (1, 300), (1, 1), (1, 130)]
_MIX = [(1, 17), (9, 300), (1, 130), (70, 70), (2, 65)]


@dataclass(frozen=True, slots=True)
class Finding:
    """How far a result is from float64, of what is allowed."""

    what: str
    error: float
    bound: float

    def row(self) -> dict[str, Any]:
        """For the report. No number is no good either."""
        return {
            "what": self.what,
            "error": self.error,
            "bound": self.bound,
            "ok": self.error <= self.bound,
        }


def _finding(what: str, found: torch.Tensor, exact: torch.Tensor) -> Finding:
    exact = exact.double()
    difference = (found.double().cpu() - exact.cpu()).abs().max()
    bound = _ROUNDINGS * torch.finfo(found.dtype).eps * max(1.0, float(exact.abs().max()))
    return Finding(what, float(difference), bound)


def operators(platform: Platform, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Products, norms, activations, rotation and the write to the pool."""
    ours, device = FlashInferOperators(platform.library), platform.device.name
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(device, dtype)

    inputs, update, weight = random(33, 256), random(33, 256), random(256)
    matrix, bias = random(128, 256), random(128)
    exact = inputs.double() @ matrix.double().T + bias.double()
    yield _finding("linear", ours.linear(inputs, matrix, bias), exact).row()
    norm = ours.rms_norm(inputs, weight, _EPS)
    yield _finding("rms_norm", norm, _normed(inputs, weight)).row()
    total = inputs.double() + update.double()
    residual = inputs.clone()
    norm = ours.add_rms_norm(residual, update.clone(), weight, _EPS)
    yield _finding("add_rms_norm", norm, _normed(total, weight)).row()
    yield _finding("add_rms_norm: residual", residual, total).row()
    gate, up = inputs.double().chunk(2, -1)
    yield _finding("silu_and_mul", ours.silu_and_mul(inputs), functional.silu(gate) * up).row()
    exact = functional.gelu(gate, approximate="tanh") * up
    yield _finding("gelu_tanh_and_mul", ours.gelu_tanh_and_mul(inputs), exact).row()
    yield from _rotation(ours, random(33, 8 * HEAD_DIM), random(2, HEAD_DIM))


def _rotation(
    ours: FlashInferOperators, qkv: torch.Tensor, weights: torch.Tensor
) -> Iterator[dict[str, Any]]:
    """Four query heads, two of keys, two of values."""
    device, tokens = qkv.device, len(qkv)
    heads = qkv.double().view(tokens, 8, HEAD_DIM)
    normed = qkv.clone()
    ours.norm_heads(normed, weights[0], weights[1], 2, _EPS)
    exact = torch.cat(
        [_normed(heads[:, :4], weights[0]), _normed(heads[:, 4:6], weights[1]), heads[:, 6:]], 1
    )
    yield _finding("norm_heads", normed.view_as(exact), exact).row()
    angles = torch.arange(512)[:, None] / 100 ** torch.linspace(0, 2, HEAD_DIM // 2)
    rope = torch.cat([angles.cos(), angles.sin()], 1).to(device)
    positions = (7 * torch.arange(tokens)).to(device)
    slots = (3 * torch.arange(tokens) + 1).to(device)
    pool = torch.zeros((2, 3 * tokens + 1, 2, HEAD_DIM), dtype=qkv.dtype, device=device)
    cosines, sines = rope[positions].double()[:, None].chunk(2, -1)
    first, second = heads[:, :6].chunk(2, -1)
    exact = torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
    queries = ours.rope_and_write(qkv.clone(), rope, positions, slots, pool[0], pool[1])
    yield _finding("rope: queries", queries, exact[:, :4]).row()
    yield _finding("rope: keys in the pool", pool[0, slots], exact[:, 4:]).row()
    yield _finding("values in the pool", pool[1, slots], heads[:, 6:]).row()


def _normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = rows.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS) * weight.double()


def attention(platform: Platform, dtype: KvDType, window: int | None) -> Iterator[dict[str, Any]]:
    """Both wrappers, over page sizes, arrangements and groups of heads; then a graph."""
    for page_size, arrangement, (query_heads, kv_heads) in (
        (16, KvArrangement.NHD, (9, 3)),
        (1, KvArrangement.NHD, (8, 8)),
        (16, KvArrangement.HND, (8, 2)),
        (64, KvArrangement.NHD, (8, 1)),
    ):
        layout = KvLayout(1, kv_heads, HEAD_DIM, dtype, page_size, arrangement)
        scene = _Scene(platform, layout, query_heads, window)
        name = f"{arrangement.value}/page {page_size}/{query_heads} heads of {kv_heads}"
        for mix in (_MIX, _DECODES):
            metadata, queries, exact = scene.step(mix)
            found = FlashInferAttention(scene.heads, window).plan(metadata).run(queries, 0)
            kind = "decode" if mix is _DECODES else "mixed"
            yield _finding(f"{kind} {name}", found, exact).row()
        yield scene.graph(name)


class _Scene:
    """A pool with random keys and values, and steps over it."""

    def __init__(
        self, platform: Platform, layout: KvLayout, query_heads: int, window: int | None
    ) -> None:
        torch.manual_seed(0)
        self._device, self._window = platform.device, window
        self._query_heads, self._slots = query_heads, 2048
        self._pool = build_kv_pool(layout, self._slots, platform.device.name)
        dtype = torch_dtype(layout.dtype)
        self._pool.buffer.copy_(torch.randn(self._pool.buffer.shape))
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=platform.device.name)
        self.heads = PagedHeads(platform.library, self._pool, query_heads, dtype, workspace)

    def step(
        self, mix: Sequence[tuple[int, int]], seed: int = 0
    ) -> tuple[AttentionMetadata, torch.Tensor, torch.Tensor]:
        """(new tokens, tokens) of sequences on shuffled pages: page tables, queries, and what
        attention to them is."""
        page_size = self._pool.layout.page_size
        pages = np.random.default_rng(seed).permutation(self._slots // page_size) + 1
        each = len(pages) // len(mix)
        table = pages[: each * len(mix)].reshape(len(mix), each, 1) * page_size
        rows = (table + np.arange(page_size)).reshape(len(mix), -1).astype(np.int32)
        counts, lengths = ([*column] for column in zip(*mix, strict=True))
        metadata = build_attention_metadata(rows, range(len(mix)), counts, lengths, page_size)
        shape = (sum(counts), self._query_heads, HEAD_DIM)
        queries = torch.randn(shape).to(self._device.name, self.heads.dtype)
        exact, start = [], 0
        for row, (count, length) in zip(rows, mix, strict=True):
            slots = torch.from_numpy(row[:length].astype(np.int64))
            exact.append(self._exact(queries[start : start + count], slots))
            start += count
        return metadata, queries, torch.cat(exact)

    def graph(self, name: str) -> dict[str, Any]:
        """One recorded graph, replayed over the page tables of another step."""
        size = len(_DECODES)
        static = StaticDecodeAttention(self.heads, self._window, size, self._slots)
        metadata, queries, _ = self.step(_DECODES)
        plan = static.plan(metadata)
        plan.run(queries, 0)
        graph, result = self._device.capture(lambda: plan.run(queries, 0))
        lengths = [(1, length + 40) for _, length in _DECODES]
        metadata, other, exact = self.step(lengths, seed=1)
        static.plan(metadata)
        queries.copy_(other)
        graph.replay()
        return _finding(f"graph {name}", result, exact).row()

    def _exact(self, queries: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[n, H * D], float64."""
        keys, values = (part.double() for part in self._pool.read(0, slots))
        group = self._query_heads // keys.shape[1]
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        at = torch.arange(len(slots) - len(queries), len(slots), device=keys.device)[:, None]
        key = torch.arange(len(slots), device=keys.device)[None]
        seen = key <= at if self._window is None else (key <= at) & (key > at - self._window)
        scores = torch.einsum("nhd,mhd->hnm", queries.double(), keys) / HEAD_DIM**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", weights, values).flatten(1)
