"""What LoRA adapters cost: steps with 0, 1 and 4 of them in the batch, beside a model without any.

    python -m benchmarks.adapters [--threads 1] [--rank 16] [--rounds 20]

The contenders take turns in every round, and of each the least CPU time of this process counts.
`loaded` has four adapters in memory and none in the batch. The rest are computed with 1 or 4 in
it, spread over the sequences; of a prompt there is one.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.forward_batch import SequenceStep, build_forward_batch
from engine.lora_weights import NO_ADAPTERS, AdaptedModule, LoraAdapters, module_shapes
from engine.model_directory import resolve_model
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from kvferry.config import BUNDLED_MODEL, DType, KvDType
from kvferry.ids import NO_ADAPTER, AdapterId
from mem_cache.mha_pool import MHATokenToKVPool
from mem_cache.req_to_token_pool import ReqToTokenPool

if TYPE_CHECKING:
    from engine.forward_batch import ForwardBatch
    from engine.model_spec import ModelSpec

_PAGE_SIZE, _CONTEXT = 16, 64
_ADAPTERS = 4
_STEPS = {"decode 1": (1, 1), "decode 8": (8, 1), "decode 32": (32, 1), "prompt 128": (1, 128)}
"""Sequences, and new tokens of each."""
_IN_BATCH = {"without": 0, "loaded": 0, "1 adapter": 1, "4 adapters": 4}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    directory = resolve_model(arguments.model, progress=True)
    spec = load_spec(directory)
    layout = spec.kv_layout(KvDType.FLOAT32, _PAGE_SIZE)
    pool = MHATokenToKVPool(layout, 64 * (_CONTEXT + 128 + _PAGE_SIZE))
    pool.buffer.normal_(std=0.5)
    adapters = random_adapters(spec, arguments.rank)
    runners = {
        name: ModelRunner(
            directory,
            pool,
            threads=arguments.threads,
            dtype=DType.FLOAT32,
            adapters=NO_ADAPTERS if name == "without" else adapters,
        )
        for name in _IN_BATCH
    }
    print(f"rank {arguments.rank}, {arguments.threads} threads; CPU ms of a step")  # noqa: T201
    for step, (sequences, tokens) in _STEPS.items():
        batches = {
            name: batch_of(sequences, tokens, sorted(adapters.ids)[: _IN_BATCH[name]])
            for name in _IN_BATCH
            if _IN_BATCH[name] <= sequences
        }
        least = dict.fromkeys(batches, float("inf"))
        for _ in range(arguments.rounds):
            for name, batch in batches.items():
                before = time.process_time()
                runners[name].forward(batch)
                least[name] = min(least[name], time.process_time() - before)
        figures = ", ".join(
            f"{name} {seconds * 1e3:.1f} ({seconds / least['without'] - 1:+.1%})"
            for name, seconds in least.items()
        )
        print(f"{step:11} {figures}")  # noqa: T201


def random_adapters(spec: ModelSpec, rank: int) -> LoraAdapters:
    """Of every module that may have one."""
    draw = torch.Generator().manual_seed(0)
    return LoraAdapters(
        {
            AdapterId(f"{number}"): {
                module: AdaptedModule(
                    torch.randn(rank, columns, generator=draw) / columns,
                    torch.randn(rows, rank, generator=draw) / rank,
                )
                for module, (rows, columns) in module_shapes(spec).items()
            }
            for number in range(_ADAPTERS)
        }
    )


def batch_of(sequences: int, tokens: int, adapters: list[AdapterId]) -> ForwardBatch:
    """So many new tokens of each sequence; adapters take turns over the sequences."""
    length = _CONTEXT + tokens
    rows = ReqToTokenPool(sequences, length)
    pages = -(-length // _PAGE_SIZE)
    for row in range(1, sequences + 1):
        first = (1 + (row - 1) * pages) * _PAGE_SIZE
        rows.write(row, 0, np.arange(first, first + length))
    token_ids = np.arange(5, 5 + tokens, dtype=np.int32)
    steps = [
        SequenceStep(
            row,
            token_ids,
            _CONTEXT,
            wants_logits=True,
            adapter=adapters[row % len(adapters)] if adapters else NO_ADAPTER,
        )
        for row in range(1, sequences + 1)
    ]
    return build_forward_batch(steps, rows, _PAGE_SIZE)


if __name__ == "__main__":
    main()
