"""The check that runs on a GPU, run on stand-ins for the device and for FlashInfer."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import Check, checks, main, pair_settings, run_checks
from benchmarks.gpu_model import Effort
from engine.cuda_model_runner import CudaModelRunner
from kvferry.clock import ManualClock
from kvferry.config import KvDType, load_config
from kvferry.membership import Role
from tests.support import fake_flashinfer
from tests.support.in_process_cluster import InProcessCluster
from tests.support.recording_device import RecordingDevice
from tests.support.small_tokenizer import VOCAB, write_tokenizer
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mem_cache.kv_pool import KvPool

EFFORT = Effort(
    prompts=3,
    answer_tokens=6,
    batches=(1, 2),
    contexts=(20,),
    prefills=(24,),
    repeats=1,
    copied_bytes=2**10,
    matrix=64,
)


class _Platform:
    """Implements `Platform`, on the CPU."""

    def __init__(self) -> None:
        self.device = RecordingDevice()
        self.library: Any = fake_flashinfer

    @contextmanager
    def cluster(self, directory: Path, sizes: Sequence[int]) -> Iterator[InProcessCluster]:
        def build(directory: Path, pool: KvPool, *, threads: int, dtype: Any) -> CudaModelRunner:
            del threads
            return CudaModelRunner(directory, pool, dtype, sizes, self.device, self.library)

        config = load_config(None, {}, pair_settings(directory))
        with (
            patch("cluster.worker_process.ModelRunner", build),
            InProcessCluster(config, (Role.PREFILL, Role.DECODE)) as cluster,
        ):
            yield cluster


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    directory = make_tiny_llama(tmp_path, TinyLlama(head_dim=64, vocab_size=VOCAB))
    write_tokenizer(directory)
    return directory


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("benchmarks.gpu_kernels", "engine.cuda_model_runner"):
        monkeypatch.setattr(f"{module}.WORKSPACE_BYTES", 64)


@pytest.mark.slow
def test_all_is_right_on_the_stand_ins(tiny: Path) -> None:
    platform, clock = _Platform(), ManualClock()
    rows: list[dict[str, Any]] = []
    todo = checks(platform, tiny, None, EFFORT, (KvDType.FLOAT16, KvDType.BFLOAT16))
    ok = run_checks(todo, clock, clock.now() + 1, rows.append)
    assert [row for row in rows if not row["ok"]] == []
    assert ok
    assert {check.name for check in todo} == {row["check"] for row in rows}
    answers = [row for row in rows if row["check"] == "answers of tiny"]
    assert [row["identical"] for row in answers] == [3, 3]
    assert all(row["moved_bytes"] > 0 for row in answers)
    assert platform.device.replays > 0
    json.dumps(rows)


@pytest.mark.parametrize(
    ("kernel", "check"),
    [
        ("silu_and_mul", "operators bfloat16"),
        pytest.param("_attend", "attention bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_kernel_is_found(
    kernel: str, check: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that gives what is 5 % too much."""
    types = (KvDType.BFLOAT16,)
    todo = [one for one in checks(_Platform(), tiny, None, EFFORT, types) if one.name == check]
    clock, rows = ManualClock(), []
    assert run_checks(todo, clock, clock.now() + 1, rows.append)
    right = vars(fake_flashinfer)[kernel]
    monkeypatch.setattr(fake_flashinfer, kernel, lambda *given: right(*given) * 1.05)
    rows.clear()
    assert not run_checks(todo, clock, clock.now() + 1, rows.append)
    assert any(row.get("error", 0.0) > row.get("bound", 1.0) for row in rows)


def test_what_fails_and_what_there_is_no_time_for_is_said() -> None:
    clock, rows = ManualClock(), []

    def late() -> Iterator[dict[str, Any]]:
        yield {"what": "slow", "ok": True}
        clock.advance(10)

    def broken() -> Iterator[dict[str, Any]]:
        raise RuntimeError("no such kernel")
        yield {}

    todo = [Check("broken", broken), Check("late", late), Check("never", broken)]
    assert not run_checks(todo, clock, clock.now() + 5, rows.append)
    assert rows == [
        {"check": "broken", "ok": False, "problem": "RuntimeError('no such kernel')"},
        {"check": "late", "what": "slow", "ok": True},
        {"check": "never", "ok": False, "problem": "no time is left"},
    ]


def test_without_a_device_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == gpu_check.NO_DEVICE
    said = json.loads(capsys.readouterr().out)
    assert said == {"check": "end", "ok": False, "problem": "no CUDA device"}
