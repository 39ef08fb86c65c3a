"""Which new tokens and which KV pages belong to which sequence of a step, in FlashInfer's CSR form.

Both backends get the same object: what tests on a CPU prove about page tables is what a GPU kernel
receives. Names and meanings as in FlashInfer's paged wrappers (`plan` arguments).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """For n sequences. All arrays int32, on the host.

    A token at position p of sequence i lies in slot
    `kv_indices[kv_indptr[i] + p // page_size] * page_size + p % page_size`.
    """

    qo_indptr: NDArray[np.int32]
    """[n + 1]: new tokens of sequence i are rows [qo_indptr[i], qo_indptr[i + 1]) of the batch."""
    kv_indptr: NDArray[np.int32]
    """[n + 1]: its pages are [kv_indptr[i], kv_indptr[i + 1]) of `kv_indices`."""
    kv_indices: NDArray[np.int32]
    """Page numbers, in logical order, the pages of the new tokens included."""
    kv_last_page_len: NDArray[np.int32]
    """[n]: tokens in the last page, 1..page_size."""
    page_size: int

    @property
    def kv_lengths(self) -> NDArray[np.int32]:
        """[n]: tokens of each sequence after this step."""
        pages = self.kv_indptr[1:] - self.kv_indptr[:-1]
        return (pages - 1) * np.int32(self.page_size) + self.kv_last_page_len

    @property
    def query_lengths(self) -> NDArray[np.int32]:
        """[n]: new tokens of each sequence."""
        return self.qo_indptr[1:] - self.qo_indptr[:-1]

    def check_invariants(self, num_pages: int) -> None:
        """Assert the shape rules, and that every page exists and is not the dummy page 0."""
        assert self.qo_indptr[0] == 0
        assert self.kv_indptr[0] == 0
        assert (self.query_lengths >= 1).all(), "a sequence of a step has at least one new token"
        assert (self.query_lengths <= self.kv_lengths).all(), "new tokens are part of the sequence"
        assert self.kv_indptr[-1] == len(self.kv_indices)
        assert ((self.kv_last_page_len >= 1) & (self.kv_last_page_len <= self.page_size)).all()
        assert ((self.kv_indices > 0) & (self.kv_indices < num_pages)).all()


def build_attention_metadata(
    req_to_token: NDArray[np.int32],
    req_pool_idx: Sequence[int],
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    page_size: int,
) -> AttentionMetadata:
    """Read the page tables of a step's sequences out of the row table [rows, context_length].

    Positions of a page are consecutive slots of one page (kv-ownership: page size), so each page is
    known by its first slot.
    """
    # A step has few sequences: numbers of Python cost less than a dozen operations on arrays.
    pages = [-(-length // page_size) for length in kv_lengths]
    rows = zip(req_pool_idx, kv_lengths, strict=True)
    kv_indices = np.concatenate([req_to_token[row, 0:length:page_size] for row, length in rows])
    if page_size > 1:
        kv_indices //= np.int32(page_size)
    last = [(length - 1) % page_size + 1 for length in kv_lengths]
    return AttentionMetadata(
        qo_indptr=_indptr(query_lengths),
        kv_indptr=_indptr(pages),
        kv_indices=kv_indices,
        kv_last_page_len=np.array(last, dtype=np.int32),
        page_size=page_size,
    )


def _indptr(counts: Sequence[int]) -> NDArray[np.int32]:
    return np.array([0, *accumulate(counts)], dtype=np.int32)
