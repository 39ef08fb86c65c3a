"""A model whose next token is a digest of the whole sequence *as read from the KV pool*.

It writes each token's id and position into the token's slot and reads the sequence back through
the page table of the step. A slot that was freed too early, written twice, moved wrongly or read
through a stale row changes the digest and with it every later token. No weights, microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.crew import Crew
from kvferry.config import KvDType
from mem_cache.layout import KvLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.forward_batch import ForwardBatch
    from mem_cache.kv_pool import KvPool

VOCAB = 211
EOS = 7


def digest_layout(page_size: int) -> KvLayout:
    """Room for (token, position) per slot."""
    return KvLayout(
        num_layers=1, num_kv_heads=1, head_dim=2, dtype=KvDType.FLOAT32, page_size=page_size
    )


def next_token(tokens: Sequence[int]) -> int:
    """What the model answers after `tokens`."""
    ids = np.asarray(tokens, dtype=np.int64)
    weights = np.arange(1, len(ids) + 1, dtype=np.int64) * 31 + 17
    return int((ids * weights).sum() % VOCAB)


def answer(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """The greedy answer of an undisturbed run."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


@dataclass(frozen=True, slots=True)
class DigestSpec:
    """The part of a model's description that the engine reads."""

    vocab_size: int = VOCAB
    eos_token_ids: tuple[int, ...] = (EOS,)


class DigestRunner:
    """Stands in for `ModelRunner`. With a window it reads the last tokens of a sequence only."""

    def __init__(self, pool: KvPool, page_size: int, window: int | None = None) -> None:
        self._window = window
        self.spec = DigestSpec()
        self.crew = Crew(1)
        """For the sampler. One thread: nothing to close."""
        self.steps: list[list[int]] = []
        self._keys = pool.buffer[0, 0, :, 0, :]
        self._values = pool.buffer[0, 1, :, 0, :]
        self._page_size = page_size

    def forward(self, batch: ForwardBatch, on_layers=None) -> torch.Tensor:
        """Logits [R, VOCAB] with a clear winner. It has one layer, so none is finished early."""
        del on_layers
        self._write(batch.out_slots, batch.token_ids, batch.positions)
        meta = batch.attention
        self.steps.append(meta.query_lengths.tolist())
        logits = torch.zeros(len(batch.logits_at), VOCAB)
        for row, at in enumerate(batch.logits_at.tolist()):
            sequence = int(np.searchsorted(meta.qo_indptr, at, side="right")) - 1
            tokens = self._read(meta, sequence, int(batch.positions[at]) + 1)
            logits[row, next_token(tokens)] = 10.0
        return logits

    def receive(self, slots: np.ndarray, tokens: np.ndarray, start: int) -> None:
        """Put the KV of `tokens`, which begin at position `start`, where a handoff would."""
        positions = torch.arange(start, start + len(tokens))
        self._write(torch.from_numpy(slots), torch.from_numpy(tokens), positions)

    def _write(self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        written = torch.stack([tokens.float(), positions.float()], dim=1)
        self._keys[slots] = written
        self._values[slots] = written

    def _read(self, meta: object, sequence: int, length: int) -> list[int]:
        """The first `length` tokens of a sequence, or the window at their end."""
        pages = meta.kv_indices[meta.kv_indptr[sequence] : meta.kv_indptr[sequence + 1]]
        start = 0 if self._window is None else max(0, length - self._window)
        within = np.arange(self._page_size)
        slots = (pages[:, None].astype(np.int64) * self._page_size + within).reshape(-1)
        slots = slots[start:length]
        assert (slots > 0).all(), "the dummy slot is read"
        keys = self._keys[torch.from_numpy(slots)]
        values = self._values[torch.from_numpy(slots)]
        assert torch.equal(keys, values), "K and V of a slot are of different tokens"
        assert keys[:, 1].tolist() == list(range(start, length)), (
            "a slot holds another position's KV"
        )
        return [int(token) for token in keys[:, 0].tolist()]
