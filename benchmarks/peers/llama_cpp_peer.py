"""llama.cpp by its C API, for `benchmarks.engine`: `python -m ... FILE.gguf THREADS`.

KV is float32 like everybody's and each sequence has a stream of its own; the rest is as it comes.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import llama_cpp

from benchmarks.peers.line_protocol import prompt, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_BATCH_TOKENS = 2048
_ROOM_TOKENS = 64
"""Per sequence, beside its context."""


class LlamaCpp:
    """Implements `Peer`."""

    def __init__(self, file: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            file.encode(), llama_cpp.llama_model_default_params()
        )
        assert self._model, f"{file} cannot be loaded"
        self._threads = threads
        self._context: Any = None

    def report(self) -> Mapping[str, object]:
        """See `Peer.report`."""
        return {
            "version": llama_cpp.__version__,
            "dtype": self._dtype(),
            "threads": llama_cpp.llama_n_threads(self._context),
        }

    def prefill(self, tokens: int) -> Callable[[], None]:
        """See `Peer.prefill`."""
        self._open(1, tokens)
        batch = _batch([(token, at, 0) for at, token in enumerate(prompt(tokens, 0))])

        def step() -> None:
            llama_cpp.llama_memory_clear(self._memory, False)
            self._compute(batch)

        return step

    def decode(self, batch: int, context: int) -> Callable[[], None]:
        """See `Peer.decode`. One sequence is computed and copied to the streams of the others."""
        self._open(batch, context)
        self._compute(_batch([(token, at, 0) for at, token in enumerate(prompt(context, 0))]))
        for sequence in range(1, batch):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        tokens = _batch([(7, context, sequence) for sequence in range(batch)], every_logits=True)

        def step() -> None:
            self._compute(tokens)
            for sequence in range(batch):
                llama_cpp.llama_memory_seq_rm(self._memory, sequence, context, -1)

        return step

    def _open(self, sequences: int, length: int) -> None:
        """A context for so many sequences; the one of before is closed."""
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        wanted = llama_cpp.llama_context_default_params()
        wanted.n_ctx = sequences * (length + _ROOM_TOKENS)
        wanted.n_batch = _BATCH_TOKENS
        wanted.n_seq_max = sequences
        wanted.n_threads = wanted.n_threads_batch = self._threads
        wanted.type_k = wanted.type_v = llama_cpp.GGML_TYPE_F32
        wanted.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, wanted)
        assert self._context, "no context"
        self._memory = llama_cpp.llama_get_memory(self._context)

    def _compute(self, batch: Any) -> None:
        code = llama_cpp.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode: {code}"
        llama_cpp.llama_synchronize(self._context)

    def _dtype(self) -> str:
        """llama.cpp describes a model like `llama 135M all F32`."""
        text = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self._model, text, len(text))
        return "float32" if text.value.endswith(b" F32") else text.value.decode()


def _batch(entries: Sequence[tuple[int, int, int]], *, every_logits: bool = False) -> Any:
    """Of (token, position, sequence); logits of the last entry, or of every one."""
    batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
    batch.n_tokens = len(entries)
    for index, (token, position, sequence) in enumerate(entries):
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = every_logits or index == len(entries) - 1
    return batch


if __name__ == "__main__":
    serve(lambda: LlamaCpp(sys.argv[1], int(sys.argv[2])))
