"""What one step computes: new tokens of several sequences, and where their KV goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.attention.metadata import AttentionMetadata, build_attention_metadata
from engine.lora import AdapterRows
from kvferry.ids import NO_ADAPTER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvferry.ids import AdapterId, TokenIds
    from mem_cache.req_to_token_pool import ReqToTokenPool


class SequenceStep(NamedTuple):
    """The part of one sequence that a step computes: a prompt chunk, or one decoded token and
    perhaps a draft of the next ones. A tuple, because one is made per sequence and step."""

    req_pool_idx: int
    token_ids: TokenIds
    """The new tokens, at least one."""
    prefix_len: int
    """Tokens before them, whose KV is already in the row's slots."""
    wants_logits: bool
    """Of the last new token."""
    draft_len: int = 0
    """How many of the new tokens are a draft: with `wants_logits`, those of each of these and of
    the one before are wanted."""
    adapter: AdapterId = NO_ADAPTER
    """What all of its tokens are computed with."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """The tokens of all sequences one after the other, those of one adapter together; T tokens, R
    rows of logits."""

    token_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T], position of each token in its sequence."""
    out_slots: torch.Tensor
    """int64 [T], where each token's KV is written."""
    attention: AttentionMetadata
    logits_at: torch.Tensor
    """int64 [R], the tokens whose logits are wanted, in the order in which the sequences were
    given."""
    adapted: tuple[AdapterRows, ...] = ()
    """Those that are computed with an adapter."""


def build_forward_batch(
    sequences: Sequence[SequenceStep], rows: ReqToTokenPool, page_size: int
) -> ForwardBatch:
    """Lay out a step. The rows must hold slots for every new token already."""
    assert sequences, "a step has at least one sequence"
    if not any(sequence.adapter for sequence in sequences):
        return _lay_out(sequences, rows, page_size)
    order = sorted(range(len(sequences)), key=lambda at: sequences[at].adapter)
    ordered = [sequences[at] for at in order]
    batch = _lay_out(ordered, rows, page_size)
    ends = np.empty(len(order), dtype=np.int32)
    ends[order] = batch.attention.qo_indptr[1:]
    return replace(
        batch,
        logits_at=torch.from_numpy(_logits_at(sequences, ends)),
        adapted=_adapted(ordered, batch.attention),
    )


def _lay_out(
    sequences: Sequence[SequenceStep], rows: ReqToTokenPool, page_size: int
) -> ForwardBatch:
    table = rows.table
    counts = [len(sequence.token_ids) for sequence in sequences]
    starts = [sequence.prefix_len for sequence in sequences]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    indices = [sequence.req_pool_idx for sequence in sequences]
    metadata = build_attention_metadata(table, indices, counts, ends, page_size)
    token_ids = np.concatenate([sequence.token_ids for sequence in sequences], dtype=np.int64)
    rows_of_tokens, positions = np.array(indices), np.array(starts)
    if len(token_ids) > len(counts):
        positions = _positions(starts, counts, metadata)
        rows_of_tokens = np.repeat(rows_of_tokens, counts)
    out_slots = table[rows_of_tokens, positions].astype(np.int64)
    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        out_slots=torch.from_numpy(out_slots),
        attention=metadata,
        logits_at=torch.from_numpy(_logits_at(sequences, metadata.qo_indptr[1:])),
    )


def dummy_batch(tokens: int, page_size: int) -> ForwardBatch:
    """A sequence all of whose pages are page 0, which nobody owns: for warming up."""
    slots = np.arange(tokens, dtype=np.int32) % page_size
    return ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(tokens),
        out_slots=torch.from_numpy(slots.astype(np.int64)),
        attention=build_attention_metadata(slots[None], [0], [tokens], [tokens], page_size),
        logits_at=torch.tensor([tokens - 1]),
    )


def _adapted(
    sequences: Sequence[SequenceStep], metadata: AttentionMetadata
) -> tuple[AdapterRows, ...]:
    adapted: list[AdapterRows] = []
    bounds = zip(sequences, pairwise(metadata.qo_indptr.tolist()), strict=True)
    for adapter, group in groupby(bounds, key=lambda bound: bound[0].adapter):
        if adapter != NO_ADAPTER:
            rows = [span for _, span in group]
            adapted.append(AdapterRows(adapter, slice(rows[0][0], rows[-1][1])))
    return tuple(adapted)


def _logits_at(sequences: Sequence[SequenceStep], ends: NDArray[np.int32]) -> NDArray[np.int64]:
    """`ends`: where each sequence ends in the batch."""
    wanted = [
        at
        for sequence, end in zip(sequences, ends.tolist(), strict=True)
        if sequence.wants_logits
        for at in range(end - 1 - sequence.draft_len, end)
    ]
    return np.asarray(wanted, dtype=np.int64)


def _positions(
    starts: list[int], counts: list[int], metadata: AttentionMetadata
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    first_rows = metadata.qo_indptr[:-1].astype(np.int64)
    shift = np.asarray(starts, dtype=np.int64) - first_rows
    total = int(metadata.qo_indptr[-1])
    return np.arange(total, dtype=np.int64) + np.repeat(shift, counts)
