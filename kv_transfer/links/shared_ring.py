"""A ring of staging buffers in memory that two processes of a host map."""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Its size is fixed for good: memory that the owner cut off would kill the other process."""


class SharedRing:
    """`count` buffers of `buffer_bytes` bytes (uint8). Which are in use is for others to know.

    The memory has no name: it is gone with the last process that holds it. A page takes memory
    from its first use on, so that a link at rest costs what its busiest moment needed.
    """

    def __init__(self, fd: int, count: int, buffer_bytes: int) -> None:
        """Map what `fd` holds. Raises `ValueError` if that is not such a ring."""
        if count < 1 or buffer_bytes < 1:
            raise ValueError(f"a ring of {count} buffers of {buffer_bytes} bytes")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the memory of the ring may still be cut off")
        if os.fstat(fd).st_size != count * buffer_bytes:
            raise ValueError(f"{os.fstat(fd).st_size} bytes for {count} of {buffer_bytes}")
        self.buffer_bytes = buffer_bytes
        memory = torch.frombuffer(mmap.mmap(fd, count * buffer_bytes), dtype=torch.uint8)
        self._buffers = memory.view(count, buffer_bytes)

    def __len__(self) -> int:
        return len(self._buffers)

    def close(self) -> None:
        """Let go of the memory; it must not be used any more."""
        self._buffers = torch.empty(0, 0, dtype=torch.uint8)

    def buffer(self, index: int) -> torch.Tensor:
        """The whole buffer, uint8 [buffer_bytes]."""
        return self._buffers[index]


def new_ring_memory(count: int, buffer_bytes: int) -> int:
    """A descriptor of new memory for a ring. The caller closes it."""
    fd = os.memfd_create("kvferry-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, count * buffer_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
