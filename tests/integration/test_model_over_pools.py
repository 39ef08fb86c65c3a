"""A Llama over every pool: what its answers owe to how its KV is stored, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.forward_batch import SequenceStep, build_forward_batch
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from kvferry.config import DType, KvArrangement, KvDType
from mem_cache.layout import KvLayout, MlaLayout
from mem_cache.mha_pool import MHATokenToKVPool
from mem_cache.mla_pool import MLATokenToKVPool
from tests.support.kv_pools import ELEMENT_TYPES, rounding_bound
from tests.support.paged_kv import make_rows, poisoned_pool
from tests.support.tiny_llama import TinyLlama, make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mem_cache.kv_pool import KvPool

    Store = Callable[[torch.Tensor], torch.Tensor]

PAGE_SIZE = 4
NEW_TOKENS = 12
COARSE = tuple(dtype for dtype in ELEMENT_TYPES if dtype is not KvDType.FLOAT32)
PROMPT = np.random.default_rng(1).integers(0, 512, 40).astype(np.int32)


class _ChangedKv(MHATokenToKVPool):
    """float32 K and V, each changed when it is written; read through the decoding kernel."""

    def __init__(self, layout: KvLayout, change: Store) -> None:
        super().__init__(layout, 1024)
        self._change = change

    in_place_dtype = None

    def write(self, layer, slots, first, second) -> None:
        super().write(layer, slots, self._change(first), self._change(second))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), TinyLlama(vocab_size=512))


@pytest.fixture
def layout(directory: Path) -> KvLayout:
    spec = load_spec(directory)
    return spec.kv_layout(KvDType.FLOAT32, PAGE_SIZE)


def _logits(directory: Path, pool: KvPool, forced: list[int] | None = None) -> torch.Tensor:
    """[1 + NEW_TOKENS, V]: after the prompt, in two chunks, and after each token of the answer.

    The answer is greedy, or `forced`, so that two pools can be compared position by position.
    """
    runner = ModelRunner(directory, pool, threads=1, dtype=DType.FLOAT32)
    rows = make_rows(PAGE_SIZE, 1)
    rounds, done = [], 0

    def step(tokens: np.ndarray) -> torch.Tensor:
        batch = build_forward_batch([SequenceStep(1, tokens, done, True)], rows, PAGE_SIZE)
        return runner.forward(batch)[0]

    for part in (PROMPT[:25], PROMPT[25:]):
        logits = step(part)
        done += len(part)
    rounds.append(logits)
    for position in range(NEW_TOKENS):
        token = int(rounds[-1].argmax()) if forced is None else forced[position]
        rounds.append(step(np.asarray([token], dtype=np.int32)))
        done += 1
    return torch.stack(rounds)


def _answer(logits: torch.Tensor) -> list[int]:
    return logits.argmax(dim=1).tolist()


@pytest.fixture(scope="module")
def exact(directory: Path) -> torch.Tensor:
    spec = load_spec(directory)
    layout = spec.kv_layout(KvDType.FLOAT32, PAGE_SIZE)
    return _logits(directory, poisoned_pool(layout))


def test_head_by_head_answers_the_same(directory: Path, layout: KvLayout, exact: torch.Tensor):
    pool = poisoned_pool(dataclasses.replace(layout, arrangement=KvArrangement.HND))
    logits = _logits(directory, pool)
    assert _answer(logits) == _answer(exact)
    torch.testing.assert_close(logits, exact, atol=1e-4, rtol=1e-5)


def _rounded(dtype: KvDType) -> Store:
    """What `dtype` makes of numbers, by another way than the product's."""

    def store(values: torch.Tensor) -> torch.Tensor:
        if dtype is not KvDType.INT8:
            name = {KvDType.FLOAT8_E4M3: "float8_e4m3fn"}.get(dtype, dtype.value)
            return values.to(vars(torch)[name]).to(torch.float32)
        numbers = values.numpy()
        scale = np.abs(numbers).max(axis=-1, keepdims=True) / np.float32(127)
        return torch.from_numpy(np.rint(numbers / scale) * scale)

    return store


@pytest.mark.parametrize("arrangement", KvArrangement)
@pytest.mark.parametrize("dtype", COARSE)
def test_coarse_kv_is_rounded_once_and_otherwise_exact(
    dtype: KvDType, arrangement: KvArrangement, directory: Path, layout: KvLayout
):
    """The same bits as with float32 KV that is rounded before it is stored."""
    coarse = dataclasses.replace(layout, dtype=dtype, arrangement=arrangement)
    expected = _logits(directory, _ChangedKv(layout, _rounded(dtype)))
    assert torch.equal(_logits(directory, poisoned_pool(coarse)), expected)


@pytest.mark.parametrize("dtype", COARSE)
def test_coarse_kv_moves_logits_as_far_as_noise_of_its_size(
    dtype: KvDType, directory: Path, layout: KvLayout, exact: torch.Tensor
):
    """Rounding moves an element by at most the bound of its type, mostly by less.

    So moving each by the whole bound, in a random direction, must on average move the logits
    further: the tolerance is the root mean square of four such runs.
    """
    forced = _answer(exact)
    coarse = poisoned_pool(dataclasses.replace(layout, dtype=dtype))
    error = (_logits(directory, coarse, forced) - exact).square().mean().sqrt()
    noisy = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)

        def store(values: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
            signs = torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
            return values + signs * rounding_bound(dtype, values).float()

        noisy.append(_logits(directory, _ChangedKv(layout, store), forced) - exact)
    tolerance = torch.stack(noisy).square().mean().sqrt()
    assert 0 < error < tolerance
    if dtype in (KvDType.FLOAT16, KvDType.BFLOAT16, KvDType.INT8):
        # Logits have a spread of some tens: these types move them by little.
        assert tolerance < 0.1 * exact.std()


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
def test_a_half_precision_model_over_every_pool(
    dtype: KvDType, directory: Path, layout: KvLayout, exact: torch.Tensor
):
    pool = poisoned_pool(dataclasses.replace(layout, dtype=dtype))
    runner = ModelRunner(directory, pool, threads=1, dtype=DType.BFLOAT16)
    steps = [SequenceStep(1, PROMPT, 0, True)]
    logits = runner.forward(build_forward_batch(steps, make_rows(PAGE_SIZE, 1), PAGE_SIZE))[0]
    assert torch.cosine_similarity(logits, exact[0], dim=0) > 0.95


def test_a_model_with_k_and_v_refuses_a_latent_pool(directory: Path):
    pool = MLATokenToKVPool(MlaLayout(2, 8, 4, KvDType.FLOAT32, PAGE_SIZE), 16)
    with pytest.raises(AssertionError, match="K and V"):
        ModelRunner(directory, pool, threads=1, dtype=DType.FLOAT32)
