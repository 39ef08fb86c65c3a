"""A model on several ranks answers as on one, and its ranks' KV is that of one, cut by heads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.forward_batch import SequenceStep, build_forward_batch
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from kvferry.config import DType, KvArrangement, KvDType
from mem_cache.mha_pool import MHATokenToKVPool
from tests.support.paged_kv import make_rows, poisoned_pool
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from mem_cache.kv_pool import KvPool

PAGE_SIZE = 4
SHAPE = TinyLlama(num_layers=3, num_heads=8, num_kv_heads=4, vocab_size=512)
PROMPT = np.random.default_rng(1).integers(0, 512, 40).astype(np.int32)
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), SHAPE)


@pytest.fixture(scope="module")
def expected(directory: Path) -> torch.Tensor:
    """Logits [40 + 6, V] of transformers after each token of prompt and greedy answer."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.from_numpy(PROMPT.astype(np.int64))[None]
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
        return model(tokens).logits[0]


def pools_of(
    directory: Path,
    ranks: int,
    dtype: KvDType = KvDType.FLOAT32,
    arrangement: KvArrangement = KvArrangement.NHD,
) -> list[KvPool]:
    spec = load_spec(directory).of_rank(ranks, "ranks")
    layout = spec.kv_layout(dtype, PAGE_SIZE, arrangement)
    return [poisoned_pool(layout) for _ in range(ranks)]


def answer(directory: Path, pools: list[KvPool], dtype: DType = DType.FLOAT32) -> torch.Tensor:
    """Logits [6 + 1, V]: after the prompt, in chunks that both kernels take, and each token."""
    runner = ModelRunner(directory, *pools, threads=1, dtype=dtype)
    rows, done, rounds = make_rows(PAGE_SIZE, 1), 0, []

    def step(tokens: np.ndarray) -> torch.Tensor:
        batch = build_forward_batch([SequenceStep(1, tokens, done, True)], rows, PAGE_SIZE)
        return runner.forward(batch)[0]

    for part in (PROMPT[:25], PROMPT[25:28], PROMPT[28:]):
        logits = step(part)
        done += len(part)
    rounds.append(logits)
    for _ in range(NEW_TOKENS):
        rounds.append(step(np.asarray([int(rounds[-1].argmax())], dtype=np.int32)))
        done += 1
    runner.close()
    return torch.stack(rounds)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_equal_transformers(directory: Path, expected: torch.Tensor, ranks: int) -> None:
    logits = answer(directory, pools_of(directory, ranks))
    assert logits.argmax(1).tolist() == expected[len(PROMPT) - 1 :].argmax(1).tolist()
    torch.testing.assert_close(logits, expected[len(PROMPT) - 1 :], atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "arrangement"),
    [(KvDType.BFLOAT16, KvArrangement.NHD), (KvDType.INT8, KvArrangement.HND)],
)
def test_coded_kv_rounds_as_on_one_rank(
    directory: Path, ranks: int, dtype: KvDType, arrangement: KvArrangement
) -> None:
    one = answer(directory, pools_of(directory, 1, dtype, arrangement))
    several = answer(directory, pools_of(directory, ranks, dtype, arrangement))
    assert several.argmax(1).tolist() == one.argmax(1).tolist()


def test_half_precision_weights(directory: Path, expected: torch.Tensor) -> None:
    logits = answer(directory, pools_of(directory, 2, KvDType.BFLOAT16), DType.BFLOAT16)
    first = expected[len(PROMPT) - 1]
    assert torch.cosine_similarity(logits[0], first, dim=0) > 0.95


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_its_heads(directory: Path, ranks: int) -> None:
    (whole,), parts = pools_of(directory, 1), pools_of(directory, ranks)
    answer(directory, [whole])
    answer(directory, parts)
    slots = make_rows(PAGE_SIZE, 1).read(1, 0, len(PROMPT) + NEW_TOKENS)
    for layer in range(SHAPE.num_layers):
        for plane in range(2):
            one = whole.read(layer, torch.from_numpy(slots))[plane]
            of_ranks = [part.read(layer, torch.from_numpy(slots))[plane] for part in parts]
            torch.testing.assert_close(torch.cat(of_ranks, dim=1), one, atol=1e-4, rtol=1e-4)


class _SlowPool(MHATokenToKVPool):
    """Takes its time to store K and V."""

    in_place_dtype = None

    def write(self, layer, slots, first, second) -> None:
        time.sleep(0.05)
        super().write(layer, slots, first, second)


@pytest.mark.parametrize("slow", [0, 1])
def test_layers_are_told_when_every_rank_has_written_them(directory: Path, slow: int) -> None:
    pools = pools_of(directory, 2)
    pools[slow] = _SlowPool(pools[slow].layout, 1024)
    pools[slow].buffer.view(torch.uint8).fill_(255)
    runner, rows = ModelRunner(directory, *pools, threads=1, dtype=DType.FLOAT32), make_rows(4, 1)
    slots = rows.read(1, 0, len(PROMPT))
    told: list[int] = []

    def on_layers(layers: int) -> None:
        told.append(layers)
        for pool in pools:
            assert not pool.buffer[:layers, :, slots].isnan().any()

    batch = build_forward_batch([SequenceStep(1, PROMPT, 0, True)], rows, PAGE_SIZE)
    runner.forward(batch, on_layers)
    assert told == [1, 2]
    for pool in pools:
        assert not pool.buffer[:, :, slots].isnan().any(), "the last layer is told by returning"
    runner.close()
