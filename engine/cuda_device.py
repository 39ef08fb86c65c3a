"""What a runner asks of a CUDA device. It has not run on one (docs/gpu.md).

The engine thread puts everything on one stream, so that kernels and copies follow one another; a
step ends when the device has done it. So nothing else has to be fenced: what other threads copy
begins after a step has ended, and ends before the next one is told of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CUDA: Any = torch.cuda
"""Torch's stubs lack the constructors."""


class Mark(Protocol):
    """A place in what the device was told to do."""

    def wait(self) -> None:
        """Until the device has come by."""
        ...


class Graph(Protocol):
    """Kernels with their arguments, recorded once."""

    def replay(self) -> None:
        """Have them run again, on what their arguments' memory holds then."""
        ...


class Device(Protocol):
    """The device of a runner; `CudaDevice`, or one on the CPU in tests."""

    name: str
    """As torch calls it."""

    def upload(self, host: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies, in one transfer, of tensors of one type and dimension. Does not wait."""
        ...

    def update(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Copy `host` over `target`, which is of its size and type. Does not wait."""
        ...

    def mark(self) -> Mark:
        """A mark behind everything that the device was told."""
        ...

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Record what `step` tells the device, and where its result will lie.

        `step` must have run before: what it makes ready once is no part of the graph. It makes
        the device wait for nothing, and what it reads of the host counts now, not when replayed.
        """
        ...


class CudaDevice:
    """Implements `Device`: the process's current CUDA device. For one thread at a time."""

    name = "cuda"

    def __init__(self) -> None:
        """Raises `ConfigError` where torch finds no device."""
        require_cuda()
        self._staging = self._pinned(0)
        self._staged: Mark = self.mark()
        self._graph_memory = _CUDA.graph_pool_handle()

    def upload(self, host: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Device.upload`."""
        whole = torch.cat(list(host))
        on_device = torch.empty_like(whole, device=self.name)
        self.update(on_device, whole)
        return list(torch.split(on_device, [len(tensor) for tensor in host]))

    def update(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """See `Device.update`."""
        target.copy_(self._stage(host), non_blocking=True)
        self._staged = self.mark()

    def mark(self) -> Mark:
        """See `Device.mark`."""
        event = _CUDA.Event()
        event.record()
        return _CudaMark(event)

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """See `Device.capture`."""
        graph: Any = _CUDA.CUDAGraph()
        # Graphs run one after the other, so that all of them compute in the same memory.
        with torch.cuda.graph(graph, pool=self._graph_memory):
            result = step()
        return graph, result

    def _stage(self, host: torch.Tensor) -> torch.Tensor:
        """`host` in memory that the device reads without the processor's help."""
        # It may still be reading what was put there before.
        self._staged.wait()
        needed = host.numel() * host.itemsize
        if needed > self._staging.numel():
            self._staging = self._pinned(2 * needed)
        place = self._staging[:needed].view(host.dtype).view(host.shape)
        return place.copy_(host)

    @staticmethod
    def _pinned(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def require_cuda() -> None:
    """Raises `ConfigError` where torch finds no CUDA device."""
    if not torch.cuda.is_available():
        problem = "is cuda; torch finds no CUDA device (workers.*.gpus gives a worker one)"
        raise ConfigError("model.device", problem)


class _CudaMark:
    """Implements `Mark`."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """See `Mark.wait`."""
        self._event.synchronize()
