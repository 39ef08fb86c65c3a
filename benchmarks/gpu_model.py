"""Whole models on a CUDA device: what they answer, and how fast. Part of `gpu_check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.cuda_model_runner import CudaModelRunner
from engine.forward_batch import SequenceStep, build_forward_batch
from engine.model_spec import load_spec
from kvferry.clock import MonotonicClock
from kvferry.config import DType, KvDType
from mem_cache.pool_choice import build_kv_pool
from mem_cache.req_to_token_pool import ReqToTokenPool
from tests.support.reference import Reference, divergence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.gpu_check import Platform
    from engine.model_spec import ModelSpec
    from mem_cache.layout import KvLayout

DTYPE = DType.FLOAT16
"""Of the two that there are kernels for, the one that rounds less."""
_TIE = 0.03
"""Two logits of the float32 reference this close, float16 may exchange."""
_PAGE_SIZE = 16
_AT_ONCE = 4
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is asked and measured."""

    prompts: int = 8
    answer_tokens: int = 48
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1024)
    prefills: tuple[int, ...] = (512, 2048)
    repeats: int = 20
    copied_bytes: int = 2**30
    matrix: int = 8192


def answers(
    platform: Platform, directory: Path, sizes: Sequence[int], effort: Effort
) -> Iterator[dict[str, Any]]:
    """Greedy answers of a prefill and a decode worker on one device, against `transformers`.

    An answer may leave the reference only where the reference itself nearly tied.
    """
    spec, generator = load_spec(directory), np.random.default_rng(0)
    lengths = generator.integers(1, 300, effort.prompts)
    prompts = [generator.integers(3, spec.vocab_size, length).tolist() for length in lengths]
    reference = Reference(directory)
    expected = [reference.greedy(prompt, effort.answer_tokens) for prompt in prompts]
    with platform.cluster(directory, sizes) as cluster:
        found = cluster.generate_all(prompts, effort.answer_tokens, _AT_ONCE)
        cluster.wait_idle()
    moved = sum(answer.finish.usage.moved_bytes for answer in found)
    diverged = [
        divergence(str(index), answer.token_ids, exact)
        for index, (answer, exact) in enumerate(zip(found, expected, strict=True))
    ]
    margins = [one.margin for one in diverged if one is not None]
    yield {
        "what": f"{len(sizes)} graphs",
        "answers": len(found),
        "identical": sum(one is None for one in diverged),
        "margins_where_they_part": margins,
        "moved_bytes": moved,
        "ok": moved > 0 and len(margins) < len(found) and all(m < _TIE for m in margins),
    }


def rates(platform: Platform, directory: Path, effort: Effort) -> Iterator[dict[str, Any]]:
    """Decode steps against the time their bytes take, prompts against that of their products."""
    bench = _Bench(platform, directory, effort)
    bytes_per_s, flops_per_s = bench.bytes_per_s(), bench.flops_per_s()
    yield {"what": "limits", "bytes_per_s": bytes_per_s, "flops_per_s": flops_per_s, "ok": True}
    for batch in effort.batches:
        for context in effort.contexts:
            seconds = bench.step(batch, 1, context)
            least = bench.bytes_of_a_decode(batch, context) / bytes_per_s
            yield {
                "what": f"decode batch {batch} context {context}",
                "tokens_per_s": batch / seconds,
                "of_memory_limit": least / seconds,
                "ok": True,
            }
    for tokens in effort.prefills:
        seconds = bench.step(1, tokens, 0)
        least = bench.flops_of_a_prompt(tokens) / flops_per_s
        yield {
            "what": f"prefill {tokens}",
            "tokens_per_s": tokens / seconds,
            "of_arithmetic_limit": least / seconds,
            "ok": True,
        }


class _Bench:
    """A runner over a pool of its own, and what its device can do at best."""

    def __init__(self, platform: Platform, directory: Path, effort: Effort) -> None:
        self._platform, self._effort = platform, effort
        self._clock = MonotonicClock()
        self._spec: ModelSpec = load_spec(directory)
        self._layout: KvLayout = self._spec.kv_layout(KvDType(DTYPE.value), _PAGE_SIZE)
        longest = max(*effort.contexts, *effort.prefills) + 1
        width = self._layout.round_up(longest)
        largest = max(effort.batches)
        self._rows = ReqToTokenPool(largest, width)
        for row in range(1, largest + 1):
            first = (row - 1) * width + _PAGE_SIZE
            self._rows.write(row, 0, np.arange(first, first + width, dtype=np.int64))
        pool = build_kv_pool(self._layout, largest * width, platform.device.name)
        self._runner = CudaModelRunner(
            directory, pool, DTYPE, effort.batches, platform.device, platform.library
        )
        self._runner.warm_up()

    def step(self, batch: int, tokens: int, prefix: int) -> float:
        """Seconds of the fastest such step, from its page tables to its logits."""
        ids = np.full(tokens, 3, dtype=np.int32)
        steps = [SequenceStep(row, ids, prefix, True) for row in range(1, batch + 1)]
        return self._best(
            lambda: self._runner.forward(build_forward_batch(steps, self._rows, _PAGE_SIZE))
        )

    def bytes_per_s(self) -> float:
        """Read and written by a copy."""
        source = torch.empty(
            self._effort.copied_bytes, dtype=torch.uint8, device=self._platform.device.name
        )
        target = torch.empty_like(source)

        def copy() -> None:
            target.copy_(source)
            self._platform.device.mark().wait()

        return 2 * self._effort.copied_bytes / self._best(copy)

    def flops_per_s(self) -> float:
        """Of one large product."""
        n = self._effort.matrix
        shape = {"dtype": torch.float16, "device": self._platform.device.name}
        left, right = torch.randn(n, n).to(**shape), torch.randn(n, n).to(**shape)

        def multiply() -> None:
            torch.mm(left, right)
            self._platform.device.mark().wait()

        return 2 * n**3 / self._best(multiply)

    def bytes_of_a_decode(self, batch: int, context: int) -> int:
        """Weights once, the embedding as the head, and the keys and values of every sequence."""
        return 2 * self._weights() + batch * context * self._layout.bytes_per_token

    def flops_of_a_prompt(self, tokens: int) -> int:
        """Products with all weights but the head, and attention to half the prompt on average."""
        spec = self._spec
        body = self._weights() - spec.vocab_size * spec.hidden_size
        attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * tokens**2
        return 2 * body * tokens + attention

    def _weights(self) -> int:
        """Numbers in the projections of all layers and the head."""
        spec = self._spec
        heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
        layer = spec.hidden_size * (heads * spec.head_dim + 3 * spec.intermediate_size)
        return spec.num_layers * layer + spec.vocab_size * spec.hidden_size

    def _best(self, run: Callable[[], object]) -> float:
        for _ in range(_WARM_UPS):
            run()
        times = []
        for _ in range(self._effort.repeats):
            started = self._clock.now()
            run()
            times.append(self._clock.now() - started)
        return min(times)
