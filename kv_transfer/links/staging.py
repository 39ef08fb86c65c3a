"""A ring of staging buffers: payload memory that belongs to a link and never to a request."""

from __future__ import annotations

from collections import deque

import torch


class StagingRing:
    """`count` buffers of `buffer_bytes` bytes (uint8), each free or taken."""

    def __init__(self, count: int, buffer_bytes: int, device: str = "cpu") -> None:
        assert count > 0
        assert buffer_bytes > 0
        self.buffer_bytes = buffer_bytes
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, device=device) for _ in range(count)
        ]
        self._free = deque(range(count))
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def free(self) -> int:
        """Buffers that may be taken."""
        return len(self._free)

    def take(self) -> int:
        """The index of a buffer that was free."""
        index = self._free.popleft()
        self._taken.add(index)
        return index

    def give_back(self, index: int) -> None:
        """End one `take`."""
        assert index in self._taken, f"staging buffer {index} is not taken"
        self._taken.remove(index)
        self._free.append(index)

    def buffer(self, index: int) -> torch.Tensor:
        """The whole buffer, uint8 [buffer_bytes]."""
        assert index in self._taken, f"staging buffer {index} is not taken"
        return self._buffers[index]
