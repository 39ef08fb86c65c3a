"""What models have beyond a Llama, through FlashInfer's operators and CUDA Graphs: stand-ins for
both, against the CPU backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.cuda_model_runner import CudaModelRunner
from engine.forward_batch import SequenceStep, build_forward_batch
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from kvferry.config import DType, KvDType
from tests.support import fake_flashinfer
from tests.support.paged_kv import make_rows, poisoned_pool
from tests.support.recording_device import RecordingDevice
from tests.support.tiny_families import VOCAB, make_family

if TYPE_CHECKING:
    from pathlib import Path

    from engine.step_runner import StepRunner

TOKENS = np.random.default_rng(1).integers(3, VOCAB, 48).astype(np.int32)
ENDS = (40, 46, 47, 48)
"""Of steps: chunks, then decoded tokens."""


@pytest.mark.parametrize(
    ("family", "replays"),
    [
        ("qwen3 with biases", 2),
        ("qwen2 mixed windows", 2),
        ("gemma2", 2),
        ("gemma3", 2),
        # Whose experts get how many tokens is no part of a graph.
        ("qwen2 moe", 0),
    ],
)
def test_logits_equal_those_on_the_cpu(
    family: str, replays: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flashinfer.widen(monkeypatch)
    directory = make_family(tmp_path, family)
    layout = load_spec(directory).kv_layout(KvDType.FLOAT32, 16)
    dtype, device = DType.FLOAT32, RecordingDevice()
    pools = [poisoned_pool(layout) for _ in range(2)]
    runners: list[StepRunner] = [
        CudaModelRunner(directory, pools[0], dtype, (1, 2), device, fake_flashinfer),
        ModelRunner(directory, pools[1], threads=1, dtype=dtype),
    ]
    for runner in runners:
        runner.warm_up()
    rows, begin = make_rows(16, 1), 0
    for end in ENDS:
        steps = [SequenceStep(1, TOKENS[begin:end], begin, wants_logits=True)]
        ours, expected = (
            runner.forward(build_forward_batch(steps, rows, 16)) for runner in runners
        )
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-4)
        begin = end
    assert device.replays == replays
