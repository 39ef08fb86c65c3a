"""A deterministic model for fault tests: a wrong byte of KV anywhere gives a wrong token.

Every layer, plane and head of a slot holds the token's id and position, shifted by a number of
its own. A step reads all of them back through its page table; the next token is the digest of
what was read. KV that is lost, late, of another request or of another layer changes the answer,
which a client can see from outside. It never raises: a dead worker would hide a wrong token.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.model_spec import load_spec
from kvferry.config import (
    CacheConfig,
    ClusterConfig,
    HandoffConfig,
    KvDType,
    ModelConfig,
    SchedulerConfig,
)
from kvferry.router_config import RouterConfig
from mem_cache.kv_pool import slots_for_budget
from mem_cache.layout import KvLayout
from tests.support.digest_model import DigestRunner

if TYPE_CHECKING:
    from pathlib import Path

    from engine.model_spec import ModelSpec
    from mem_cache.kv_pool import KvPool

LAYERS, HEADS = 3, 2
ROWS = 24
CONTEXT = 640
PAGE_SIZE = 8
SLOTS, FEW_SLOTS = 2400, CONTEXT
LINK_TIMEOUT_S = 5.0
STATUS_INTERVAL_S = 0.1
STEP_S = 0.004
"""A step takes so long, as if something were computed: a prompt of 400 tokens is 13 steps."""

_LAYER_SHIFT, _PLANE_SHIFT, _HEAD_SHIFT = 1000.0, 100_000.0, 10_000.0


def fault_layout() -> KvLayout:
    """Room for (token, position) in every head of K and V of every layer."""
    return KvLayout(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=2,
        dtype=KvDType.FLOAT32,
        page_size=PAGE_SIZE,
    )


def fault_config(trace_file: str) -> ClusterConfig:
    """Workers that move KV in small chunks and give up links early."""
    layout = fault_layout()
    return ClusterConfig(
        model=ModelConfig(context_length=CONTEXT),
        cache=CacheConfig(
            page_size=PAGE_SIZE,
            memory_bytes=_memory_bytes(SLOTS),
            rows=ROWS,
            audit_interval_steps=16,
        ),
        scheduler=SchedulerConfig(chunk_tokens=32, output_reserve=0.0),
        handoff=HandoffConfig(
            staging_buffer_bytes=16 * layout.bytes_per_token,
            staging_buffers=3,
            checksums=True,
            link_timeout_s=LINK_TIMEOUT_S,
            trace_file=trace_file,
        ),
        router=RouterConfig(port=0, status_interval_s=STATUS_INTERVAL_S),
    )


def with_few_slots(config: ClusterConfig) -> ClusterConfig:
    """For decode workers that have no room at times, so that handoffs wait."""
    memory_bytes = _memory_bytes(FEW_SLOTS)
    return dataclasses.replace(
        config, cache=dataclasses.replace(config.cache, memory_bytes=memory_bytes)
    )


def _memory_bytes(num_slots: int) -> int:
    layout = fault_layout()
    fixed = 4 * (ROWS + 1) * CONTEXT + PAGE_SIZE * layout.bytes_per_token
    memory_bytes = fixed + num_slots * layout.bytes_per_token
    assert slots_for_budget(memory_bytes, layout, ROWS, CONTEXT) == num_slots
    return memory_bytes


def fault_spec(directory: Path) -> ModelSpec:
    """The model's description, with K and V of this model."""
    return dataclasses.replace(
        load_spec(directory), num_layers=LAYERS, num_kv_heads=HEADS, head_dim=2
    )


class FaultRunner(DigestRunner):
    """Made as a worker makes its model."""

    def __init__(self, directory: Path, kv_pool: KvPool, **how: object) -> None:
        """`how`: what the model is computed with."""
        super().__init__(kv_pool, kv_pool.layout.page_size)
        self._pool = kv_pool
        self.crew = None  # tokens are chosen on the engine thread
        self._on_layers = None
        layers = torch.arange(LAYERS) * _LAYER_SHIFT
        planes = torch.arange(2) * _PLANE_SHIFT
        heads = torch.arange(HEADS) * _HEAD_SHIFT
        self._shifts = (
            layers.view(-1, 1, 1, 1) + planes.view(1, -1, 1, 1) + heads.view(1, 1, 1, -1)
        ).unsqueeze(-1)
        """[layers, 2, 1, heads, 1], float32."""

    def warm_up(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """It has no threads."""

    def forward(self, batch, on_layers=None):
        self._on_layers = on_layers
        return super().forward(batch)

    def _write(self, slots, tokens, positions) -> None:
        values = torch.stack([tokens.float(), positions.float()], dim=1).view(1, 1, -1, 1, 2)
        for layer, (keys, vals) in enumerate(values + self._shifts):
            time.sleep(STEP_S / LAYERS)
            self._pool.write(layer, slots, keys, vals)
            if self._on_layers is not None and layer + 1 < LAYERS:
                self._on_layers(layer + 1)

    def _read(self, meta, sequence, length) -> list[int]:
        pages = meta.kv_indices[meta.kv_indptr[sequence] : meta.kv_indptr[sequence + 1]]
        within = np.arange(self._page_size)
        slots = (np.asarray(pages)[:, None].astype(np.int64) * self._page_size + within).reshape(-1)
        read = torch.stack(
            [
                torch.stack(self._pool.read(layer, torch.from_numpy(slots[:length])))
                for layer in range(LAYERS)
            ]
        )
        return digested((read - self._shifts).numpy())


def digested(values: np.ndarray) -> list[int]:
    """The tokens of values [layers, 2, n, heads, 2]; others where anything in them is wrong."""
    tokens, positions = values[0, 0, :, 0, 0], values[0, 0, :, 0, 1]
    wrong = (values != values[:1, :1, :, :1]).any(axis=(0, 1, 3, 4))
    wrong |= positions != np.arange(len(positions))
    return [int(token) for token in np.where(wrong, tokens + 1, tokens)]
