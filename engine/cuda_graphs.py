"""Decode steps as CUDA Graphs: one per batch size, to the next of which a step is padded.

A graph's kernels have their arguments fixed, so each size has input tensors and page tables of its
own, which a step is copied into. Padding is sequences of one token that lies in slot 0 of page 0,
the page that nobody owns: what they write and read there means nothing to anyone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention.metadata import AttentionMetadata
from engine.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.attention.backend import AttentionBackend, AttentionPlan
    from engine.cuda_device import Device, Graph

_INPUTS = 3
"""Token ids, positions and slots of a step."""


class PreparedAttention:
    """Implements `AttentionBackend` by a plan made before: a graph has no place for planning."""

    def __init__(self) -> None:
        self._plan: AttentionPlan | None = None

    def use(self, plan: AttentionPlan) -> None:
        """Of the next forward."""
        self._plan = plan

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """See `AttentionBackend.plan`; the metadata is that of the plan in use."""
        del metadata
        assert self._plan is not None, "no plan was made for this step"
        return self._plan


@dataclass(frozen=True, slots=True, eq=False)
class StepParts:
    """What graphs are made of. `attention(n)` makes one for decode steps of n sequences."""

    device: Device
    prepared: PreparedAttention
    forward: Callable[[ForwardBatch], torch.Tensor]
    """Logits [R, V] of a batch on the device, attention as prepared."""
    attention: Callable[[int], AttentionBackend]
    page_size: int


class DecodeGraphs:
    """The graphs of a runner."""

    def __init__(self, parts: StepParts, sizes: Sequence[int]) -> None:
        """`sizes`: of batches, ascending; none: every step is computed kernel by kernel."""
        assert list(sizes) == sorted(set(sizes)), f"sizes {sizes} do not ascend"
        self._parts = parts
        self._sizes = tuple(sizes)
        self._graphs: dict[int, _DecodeGraph] = {}

    def capture(self) -> None:
        """Record all of them, the largest first: what it allocates serves the others, too."""
        for size in reversed(self._sizes):
            self._graphs[size] = _DecodeGraph(self._parts, size)

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """As a runner's `forward`; None: the step is none that a graph was recorded of, or has
        adapters: whose, and on how many tokens, no graph knows."""
        sequences = len(batch.token_ids)
        is_decode = len(batch.attention.query_lengths) == len(batch.logits_at) == sequences
        size = next((size for size in self._sizes if size >= sequences), None)
        if not is_decode or batch.adapted or size is None or not self._graphs:
            return None
        return self._graphs[size].forward(batch)[:sequences]


class _DecodeGraph:
    """Decode steps of one size."""

    def __init__(self, parts: StepParts, size: int) -> None:
        self._parts = parts
        self._size = size
        self._attention = parts.attention(size)
        self._inputs = torch.zeros((_INPUTS, size), dtype=torch.int64, device=parts.device.name)
        token_ids, positions, out_slots = self._inputs.unbind()
        padding = padded(_nothing(parts.page_size), size)
        self._batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            out_slots=out_slots,
            attention=padding.attention,
            logits_at=torch.arange(size, device=parts.device.name),
        )
        parts.prepared.use(self._attention.plan(padding.attention))
        # Libraries make ready at first use what must not be part of a graph.
        parts.forward(self._batch)
        parts.device.mark().wait()
        self._graph: Graph
        self._graph, self._logits = parts.device.capture(lambda: parts.forward(self._batch))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 [size, V]: the logits of the sequences, then of the padding."""
        step = padded(batch, self._size)
        self._attention.plan(step.attention)
        inputs = torch.stack([step.token_ids, step.positions, step.out_slots])
        self._parts.device.update(self._inputs, inputs)
        self._graph.replay()
        # The next replay writes there again.
        return self._logits.clone()


def padded(batch: ForwardBatch, size: int) -> ForwardBatch:
    """A decode step on the host with so many sequences: the rest have token 0, in slot 0."""
    missing = size - len(batch.token_ids)
    zeros = torch.zeros(missing, dtype=torch.int64)
    attention = batch.attention
    ones = np.ones(missing, dtype=np.int32)
    steps = np.arange(1, missing + 1, dtype=np.int32)
    return ForwardBatch(
        token_ids=torch.cat([batch.token_ids, zeros]),
        positions=torch.cat([batch.positions, zeros]),
        out_slots=torch.cat([batch.out_slots, zeros]),
        attention=AttentionMetadata(
            qo_indptr=np.concatenate([attention.qo_indptr, attention.qo_indptr[-1] + steps]),
            kv_indptr=np.concatenate([attention.kv_indptr, attention.kv_indptr[-1] + steps]),
            kv_indices=np.concatenate([attention.kv_indices, 0 * ones]),
            kv_last_page_len=np.concatenate([attention.kv_last_page_len, ones]),
            page_size=attention.page_size,
        ),
        logits_at=torch.arange(size),
    )


def _nothing(page_size: int) -> ForwardBatch:
    """A step of no sequences."""
    none = torch.zeros(0, dtype=torch.int64)
    start, empty = np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32)
    return ForwardBatch(
        token_ids=none,
        positions=none,
        out_slots=none,
        attention=AttentionMetadata(start, start, empty, empty, page_size),
        logits_at=none,
    )


def graph_sizes(running_max: int) -> tuple[int, ...]:
    """Sizes up to `running_max`: powers of two to 8, then every eighth, so that padding costs
    little; and `running_max` itself."""
    sizes = {1, 2, 4, *range(8, running_max, 8), running_max}
    return tuple(sorted(size for size in sizes if size <= running_max))
