"""Staging on its way to a CUDA device, which is the host here and says what was waited for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine import cuda_device
from engine.cuda_device import CudaDevice


class _Event:
    """A mark of which is told."""

    def __init__(self, said: list[str]) -> None:
        self._said = said
        self._name = ""

    def record(self) -> None:
        self._name = str(sum(entry.startswith("mark") for entry in self._said))
        self._said.append(f"mark {self._name}")

    def synchronize(self) -> None:
        self._said.append(f"passed {self._name}")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def device(said: list[str], monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    cuda = SimpleNamespace(Event=lambda: _Event(said), graph_pool_handle=lambda: (0, 0))
    monkeypatch.setattr(cuda_device, "_CUDA", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(CudaDevice, "name", "cpu")
    unpinned = staticmethod(lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(CudaDevice, "_pinned", unpinned)
    return CudaDevice()


def test_what_is_uploaded_stays(device: CudaDevice) -> None:
    parts = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.zeros(0, dtype=torch.int64)]
    first = device.upload(parts)
    second = device.upload([torch.arange(100)])
    assert [part.tolist() for part in first] == [[1, 2, 3], [4], []]
    assert second[0].tolist() == list(range(100))


def test_a_static_tensor_is_overwritten(device: CudaDevice) -> None:
    static = torch.zeros((2, 3), dtype=torch.int64)
    device.update(static, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert static.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_staging_waits_for_the_transfer_before(device: CudaDevice, said: list[str]) -> None:
    static = torch.zeros(2)
    for _ in range(3):
        device.update(static, torch.ones(2))
    assert said == ["mark 0", "passed 0", "mark 1", "passed 1", "mark 2", "passed 2", "mark 3"]
