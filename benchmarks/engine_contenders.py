"""The engines that `benchmarks.engine` compares, each as a maker of steps."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from engine.attention.cpu import CpuAttention
from engine.crew import Crew
from engine.forward_batch import SequenceStep, build_forward_batch
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from kvferry.clock import MonotonicClock
from kvferry.config import DType, KvDType, Quantization
from mem_cache.mha_pool import MHATokenToKVPool
from mem_cache.req_to_token_pool import ReqToTokenPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.forward_batch import ForwardBatch

PAGE_SIZE = 16
CHUNK_TOKENS = 512


class Contender(Protocol):
    """An engine. Its steps may be called any number of times; each says how long it took.

    Only the last step that an engine has made is called.
    """

    name: str

    def prefill(self, tokens: int) -> Callable[[], float]:
        """A step that computes a prompt of `tokens` and the logits after it. Seconds."""
        ...

    def decode(self, batch: int, context: int) -> Callable[[], float]:
        """A step that computes one token of `batch` sequences of `context` tokens. Seconds."""
        ...


def timed(step: Callable[[], None]) -> Callable[[], float]:
    """The same step, which now returns the seconds it took."""
    clock = MonotonicClock()

    def run() -> float:
        before = clock.now()
        step()
        return clock.now() - before

    return run


class Kvferry:
    """This engine, over its own pool, page table and step layout."""

    name = "kvferry"

    def __init__(
        self,
        directory: Path,
        threads: int,
        num_slots: int,
        quantization: Quantization = Quantization.NONE,
        kv_dtype: KvDType = KvDType.FLOAT32,
    ) -> None:
        if quantization is not Quantization.NONE:
            self.name = f"kvferry-{quantization.value}"
        if kv_dtype is not KvDType.FLOAT32:
            self.name = f"kvferry-{kv_dtype.value}-kv"
        spec = load_spec(directory)
        layout = spec.kv_layout(kv_dtype, PAGE_SIZE)
        # A page more per sequence, for its last one.
        self._num_slots = layout.round_up(num_slots) + 64 * PAGE_SIZE
        self.pool = MHATokenToKVPool(layout, self._num_slots)
        self._fill_pool()
        self._runner = ModelRunner(
            directory,
            self.pool,
            threads=threads,
            dtype=DType.FLOAT32,
            quantization=quantization,
        )
        self._runner.warm_up()

    def _fill_pool(self) -> None:
        """With numbers as they are stored; int8 ones beside their scales."""
        if self.pool.in_place_dtype is not None:
            self.pool.buffer.normal_(std=0.5)
            return
        layout, slots = self.pool.layout, torch.arange(self._num_slots)
        shape = (self._num_slots, layout.num_kv_heads, layout.head_dim)
        keys, values = torch.randn(shape), torch.randn(shape)
        for layer in range(layout.num_layers):
            self.pool.write(layer, slots, keys, values)

    def rows(self, batch: int, length: int) -> ReqToTokenPool:
        """`batch` rows of `length` positions on shuffled pages."""
        pages = -(-length // PAGE_SIZE)
        order = np.random.default_rng(0).permutation(self._num_slots // PAGE_SIZE) + 1
        rows = ReqToTokenPool(batch, pages * PAGE_SIZE)
        for row in range(1, batch + 1):
            mine = order[(row - 1) * pages : row * pages]
            rows.write(row, 0, (mine[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1))
        return rows

    def batches(self, batch: int, length: int, prefix_len: int) -> list[ForwardBatch]:
        """The batches of a step that brings sequences from `prefix_len` to `length`."""
        rows = self.rows(batch, length)
        cuts = [*range(prefix_len, length, CHUNK_TOKENS), length]
        return [
            build_forward_batch(
                [
                    SequenceStep(row, _tokens(stop - start), start, wants_logits=stop == length)
                    for row in range(1, batch + 1)
                ],
                rows,
                PAGE_SIZE,
            )
            for start, stop in itertools.pairwise(cuts)
        ]

    def prefill(self, tokens: int) -> Callable[[], float]:
        """See `Contender.prefill`."""
        return self._step(1, tokens, 0)

    def decode(self, batch: int, context: int) -> Callable[[], float]:
        """See `Contender.decode`."""
        return self._step(batch, context + 1, context)

    def first_token(self, prompt_tokens: int) -> int:
        """The likeliest token after a short prompt."""
        (part,) = self.batches(1, prompt_tokens, 0)
        return int(self._runner.forward(part).argmax())

    def _step(self, batch: int, length: int, prefix_len: int) -> Callable[[], float]:
        def step() -> None:
            for part in self.batches(batch, length, prefix_len):
                self._runner.forward(part)

        return timed(step)


class Transformers:
    """The model of `transformers` with its default (sdpa) attention and its dynamic cache."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self._model = model

    def prefill(self, tokens: int) -> Callable[[], float]:
        """See `Contender.prefill`."""
        ids = torch.from_numpy(_tokens(tokens).astype(np.int64))[None]

        @torch.inference_mode()
        def step() -> None:
            self._model(ids, use_cache=True, logits_to_keep=1)

        return timed(step)

    def decode(self, batch: int, context: int) -> Callable[[], float]:
        """See `Contender.decode`."""
        import transformers

        config = self._model.config
        heads = (batch, config.num_key_value_heads, context, config.head_dim)
        cache = transformers.DynamicCache()
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(heads), torch.randn(heads), layer)
        ids = torch.ones(batch, 1, dtype=torch.int64)
        positions = torch.full((batch, 1), context)

        @torch.inference_mode()
        def step() -> None:
            self._model(ids, past_key_values=cache, position_ids=positions, logits_to_keep=1)
            cache.crop(-1)

        return timed(step)


class RegisteredAttention:
    """The modules of `transformers` over our pool: an attention function registered with it."""

    name = "transformers+registered-attention"
    _registered = "kvferry_paged"

    def __init__(self, directory: Path, kvferry: Kvferry, threads: int) -> None:
        import transformers

        transformers.AttentionInterface.register(self._registered, self._attend)
        transformers.AttentionMaskInterface.register(self._registered, lambda *_, **__: None)
        self._kvferry = kvferry
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=self._registered
        )
        self._attention = CpuAttention(self._kvferry.pool, Crew(threads))

    def prefill(self, tokens: int) -> Callable[[], float]:
        """See `Contender.prefill`."""
        return self._step(1, tokens, 0)

    def decode(self, batch: int, context: int) -> Callable[[], float]:
        """See `Contender.decode`."""
        return self._step(batch, context + 1, context)

    def _step(self, batch: int, length: int, prefix_len: int) -> Callable[[], float]:
        @torch.inference_mode()
        def step() -> None:
            for part in self._kvferry.batches(batch, length, prefix_len):
                keep: Any = part.logits_at if len(part.logits_at) else 1
                self._model(
                    part.token_ids[None],
                    position_ids=part.positions[None],
                    use_cache=False,
                    logits_to_keep=keep,
                    step=part,
                    plan=self._attention.plan(part.attention),
                )

        return timed(step)

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any,
        step: ForwardBatch, plan: Any, **__: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        pool = self._kvferry.pool
        pool.write(
            module.layer_idx, step.out_slots, key[0].transpose(0, 1), value[0].transpose(0, 1)
        )
        queries = query[0].transpose(0, 1).contiguous()
        out = plan.run(queries, module.layer_idx)
        return out.view(1, *queries.shape), None


def load_transformers(directory: Path) -> Any:
    """The reference model in float32."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _tokens(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return (np.arange(count, dtype=np.int32) * 7919 + 100) % 40_000
