"""Which kernels there are, and that processes divide them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine import kernel_set
from engine.attention.vectors import FORMS
from engine.kernel_set import KernelSet
from kvferry.config import KvDType

if TYPE_CHECKING:
    import pytest

FLOAT32 = FORMS[KvDType.FLOAT32]
LLAMA = KernelSet(FLOAT32, is_float32=True, is_quantized=False, gelu=False, head_norms=False)


class _Task:
    """Implements what `compile_all` asks of a task. Odd ones are taken by another process."""

    def __init__(self, number: int, log: list[str]) -> None:
        self._number = number
        self._log = log

    @property
    def is_compiled(self) -> bool:
        return False

    def compile_if_free(self) -> None:
        if self._number % 2 == 0:
            self._log.append(f"compile {self._number}")

    @property
    def address(self) -> int:
        self._log.append(f"have {self._number}")
        return self._number


def test_only_what_a_model_needs() -> None:
    llama = LLAMA.tasks()
    assert len({id(task) for task in llama}) == len(llama) == 8
    with_norms = KernelSet(FLOAT32, True, False, False, True).tasks()
    assert len(with_norms) == 9
    assert set(llama) < set(with_norms)
    quantized = set(KernelSet(FLOAT32, True, True, False, False).tasks())
    assert len(quantized - set(llama)) == 2
    gelu = set(KernelSet(FLOAT32, True, False, True, False).tasks())
    assert len(gelu - set(llama)) == 1
    assert len(KernelSet(FLOAT32, False, False, False, False).tasks()) == 2


def test_all_is_compiled_when_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """First what is free, so that nobody waits while there is work; then what others do."""
    log: list[str] = []
    tasks = [_Task(number, log) for number in range(4)]
    monkeypatch.setattr(KernelSet, "tasks", lambda _: tasks)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    LLAMA.compile_all()
    assert log == ["compile 0", "compile 2", "have 0", "have 1", "have 2", "have 3"]


def test_a_helper_begins_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    tasks = [_Task(2 * number, log) for number in range(3)]
    monkeypatch.setattr(KernelSet, "tasks", lambda _: tasks)
    monkeypatch.setattr("sys.argv", ["kernel_set", "1", str(FLOAT32), "1", "0", "0", "0"])
    kernel_set.main()
    assert log == ["compile 2", "compile 4", "compile 0"]
