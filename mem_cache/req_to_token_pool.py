"""Request rows: logical position -> physical slot, for every sequence being tracked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvferry.ids import SlotIndices


class RowHolder(Protocol):
    """What a request must have to be given a row."""

    req_pool_idx: int | None
    req_generation: int


class ReqToTokenPool:
    """The row table `R[r, p]`, and which rows are free. Row 0 is never handed out.

    `req_to_token` is int32 `[rows + 1, context_length]` on the host, where a step's page tables are
    read out of it; kernels on a device get those. `table` is the same as an array.
    """

    def __init__(self, rows: int, context_length: int) -> None:
        self.num_rows = rows
        self.context_length = context_length
        self.table: NDArray[np.int32] = np.zeros((rows + 1, context_length), dtype=np.int32)
        self.req_to_token: torch.Tensor = torch.from_numpy(self.table)
        # Asked at every call of the cache: a list answers sooner than an array.
        self._generations = [0] * (rows + 1)
        self._free = list(range(rows, 0, -1))

    @property
    def num_free(self) -> int:
        """Rows that `alloc` can still give."""
        return len(self._free)

    def alloc(self, reqs: Sequence[RowHolder]) -> list[int] | None:
        """Give a row to each request that has none; a request that has one keeps it.

        Returns the row of every request, or None, with nothing changed, if rows are too few.
        """
        rowless = [req for req in reqs if req.req_pool_idx is None]
        if len(rowless) > len(self._free):
            return None
        if rowless:
            taken = self._free[-len(rowless) :]
            del self._free[-len(rowless) :]
            for req, row in zip(rowless, reversed(taken), strict=True):
                req.req_pool_idx = row
                req.req_generation = self.generation(row)
        return [req.req_pool_idx for req in reqs if req.req_pool_idx is not None]

    def free(self, req: RowHolder) -> int:
        """Take the request's row back and return its number. Frees no KV slot."""
        row = req.req_pool_idx
        assert row is not None, "the request has no row to free"
        assert self.is_current(row, req.req_generation), f"check 6: row {row} has another holder"
        # Growing here, not at alloc, makes a reference stale as soon as its row is given back.
        self._generations[row] += 1
        self._free.append(row)
        req.req_pool_idx = None
        return row

    def clear(self) -> None:
        """Take all rows back. Generations go on growing: references from before are stale."""
        self._generations = [generation + 1 for generation in self._generations]
        self._free = list(range(self.num_rows, 0, -1))

    def generation(self, row: int) -> int:
        """How often the row was given back; what its present holder was told at `alloc`."""
        return self._generations[row]

    def is_current(self, row: int, generation: int) -> bool:
        """Whether a reference to the row, taken at `generation`, still means the same holder."""
        return 0 < row <= self.num_rows and self.generation(row) == generation

    def free_rows(self) -> tuple[int, ...]:
        """The free rows, next one last."""
        return tuple(self._free)

    def write(self, row: int, start: int, slots: SlotIndices) -> None:
        """R[row, start : start + len(slots)] = slots."""
        stop = start + len(slots)
        assert 0 < row <= self.num_rows, f"row {row} is reserved or out of range"
        assert stop <= self.context_length, f"position {stop} is beyond {self.context_length}"
        self.table[row, start:stop] = slots

    def read(self, row: int, start: int, stop: int) -> SlotIndices:
        """A copy of R[row, start:stop]: the row may be reused while the caller holds it."""
        return self.table[row, start:stop].astype(np.int64)
