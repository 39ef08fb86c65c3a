"""vLLM's CPU build, for `benchmarks.engine`: `python -m ... DIRECTORY THREADS`.

Its engine core runs in this process and is asked step by step, compiled as it is by default.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import torch
import vllm

from benchmarks.peers.line_protocol import prompt, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_CONTEXT_TOKENS = 4096
_SEQUENCES = 32
_PREPARATION_STEPS_MAX = 1000


class Vllm:
    """Implements `Peer`."""

    def __init__(self, directory: str) -> None:
        self._engine = vllm.LLM(
            model=directory,
            dtype="float32",
            max_model_len=_CONTEXT_TOKENS,
            max_num_seqs=_SEQUENCES,
            # Any prompt of a benchmark in one step.
            max_num_batched_tokens=_CONTEXT_TOKENS,
            # Every prompt is computed, and every sequence has KV of its own.
            enable_prefix_caching=False,
            async_scheduling=False,
        ).llm_engine
        self._numbers = itertools.count()
        self._running: list[str] = []

    def report(self) -> Mapping[str, object]:
        """See `Peer.report`."""
        return {
            "version": vllm.__version__,
            "dtype": str(self._engine.model_config.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }

    def prefill(self, tokens: int) -> Callable[[], None]:
        """See `Peer.prefill`."""
        self._abort_all()

        def step() -> None:
            self._add(tokens, answer_tokens=1)
            while self._engine.has_unfinished_requests():
                self._engine.step()
            self._running.clear()

        return step

    def decode(self, batch: int, context: int) -> Callable[[], None]:
        """See `Peer.decode`. Sequences grow by a token in each step."""
        self._abort_all()
        waiting = {self._add(context, _CONTEXT_TOKENS - context) for _ in range(batch)}
        for _ in range(_PREPARATION_STEPS_MAX):
            waiting -= {output.request_id for output in self._engine.step()}
            if not waiting:
                return self._decode_one(batch)
        raise AssertionError(f"{len(waiting)} prompts are not computed")

    def _decode_one(self, batch: int) -> Callable[[], None]:
        def step() -> None:
            answered = len(self._engine.step())
            assert answered == batch, f"{answered} sequences of {batch} got a token"

        return step

    def _add(self, tokens: int, answer_tokens: int) -> str:
        number = next(self._numbers)
        self._running.append(str(number))
        wanted = vllm.SamplingParams(
            temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False
        )
        ids = {"prompt_token_ids": prompt(tokens, number)}
        self._engine.add_request(str(number), ids, wanted)
        return str(number)

    def _abort_all(self) -> None:
        if self._running:
            self._engine.abort_request(self._running)
            self._running.clear()


if __name__ == "__main__":
    serve(lambda: Vllm(sys.argv[1]))
