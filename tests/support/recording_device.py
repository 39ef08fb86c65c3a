"""A CUDA device on the CPU: it runs what it is told at once, and records graphs as a real one does.

A graph is the torch operations of a step with the tensors they had. Replayed, these run again and
none of the Python around them, so that whatever a step took from anywhere but its static tensors
stays as it was. A result is nothing before the first replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WAITING = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"}
    | {"lift_fresh", "bincount"}
)
"""Operations that make the host wait for the device, or read host memory: a graph has none."""


class RecordingDevice:
    """Implements `Device`."""

    name = "cpu"

    def __init__(self) -> None:
        self.replays = 0
        self.uploads = 0

    def upload(self, host: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Device.upload`."""
        self.uploads += 1
        return list(torch.cat(list(host)).split([len(tensor) for tensor in host]))

    def update(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """See `Device.update`."""
        assert target.shape == host.shape
        assert target.dtype == host.dtype
        target.copy_(host)

    def mark(self) -> _Passed:
        """See `Device.mark`."""
        return _Passed()

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[_Recording, torch.Tensor]:
        """See `Device.capture`."""
        recording = _Recording(self)
        with recording:
            result = step()
        with torch.inference_mode():
            result.fill_(torch.nan)
        return recording, result


class _Passed:
    """Implements `Mark`."""

    def wait(self) -> None:
        """See `Mark.wait`."""


class _Recording(TorchDispatchMode):
    """Implements `Graph`."""

    def __init__(self, device: RecordingDevice) -> None:
        super().__init__()
        self._device = device
        self._operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and remember it."""
        name = func.overloadpacket.__name__
        assert name not in _WAITING, f"{name} has no place in a graph"
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, _tensors(result)))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        """See `Graph.replay`."""
        self._device.replays += 1
        for func, args, kwargs, results in self._operations:
            for old, new in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                # Views, and what an operation changes in place, are where they were.
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
