"""What drafts by n-grams save: CPU time per token with and without them.

    python -m benchmarks.speculation --json [--batch 1 8] [--tokens 96] [--rounds 3] [--draft 3]

One JSON object a line:

* {"what": "speculation", "prompt", "batch", "plain_ms", "drafts_ms", "ratio", "accepted",
  "drafted", "same"}: SmolLM2-135M on one thread, greedy, ms of CPU time of the engine thread per
  token of the answers. `prompt` is "repeats" (a text to be gone on with as it began) or "new" (a
  story). Engines with and without drafts take turns; the times are the best of the rounds, `ratio`
  is theirs (below 1: drafts are cheaper). `accepted` of `drafted` tokens were right. `same`:
  answers that are equal.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from engine.engine import Engine
from engine.model_directory import resolve_model
from engine.model_runner import ModelRunner
from engine.model_spec import load_spec
from engine.request import Request
from engine.speculation import drafts_of
from kvferry.cache_key import CacheUse
from kvferry.clock import MonotonicClock, thread_cpu_s
from kvferry.config import (
    BUNDLED_MODEL,
    CacheConfig,
    DType,
    KvDType,
    NgramConfig,
    SchedulerConfig,
)
from kvferry.ids import Attempt, AttemptId, ExtraKey, RequestId
from kvferry.sampling import SamplingParams
from mem_cache.factory import assemble_kv_cache

if TYPE_CHECKING:
    from engine.speculation import Drafts
    from kvferry.errors import KvferryError
    from kvferry.generation import FinishReason, OutputToken
    from kvferry.ids import TokenIds

PAGE_SIZE = 16
_SLOTS = 8192
_CONTEXT = 1024
_MESSAGE = (
    "Dear {name}, the ferry to the island leaves at nine from the second pier. Bring {name}'s "
    "ticket, a warm coat and something to eat, because the crossing takes three hours. "
)
_STORY = (
    "<|im_start|>user\nTell me a story about {name} and a lighthouse.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
_NAMES = ("Ada", "Bruno", "Clara", "Daniel", "Edith", "Felix", "Greta", "Hugo")


def main() -> None:
    """Each prompt at each batch size."""
    arguments = _parse()
    bench = _Bench(arguments.draft)
    for prompt, text in (("repeats", 3 * _MESSAGE), ("new", _STORY)):
        for batch in arguments.batch:
            row = bench.compare(prompt, text, batch, arguments.tokens, arguments.rounds)
            print(  # noqa: T201
                json.dumps(row)
                if arguments.json
                else " ".join(f"{name}={value}" for name, value in row.items()),
                flush=True,
            )


class _Answers:
    """A `RequestListener` that keeps the tokens."""

    def __init__(self) -> None:
        self.told: dict[str, list[int]] = {}
        self.open = 0

    def admitted(self, request: Request) -> None:
        """Of no interest, as are the next two."""

    def computing(self, request: Request, tokens: int, layers: int) -> None:
        """Nobody waits for layers."""

    def computed(self, request: Request) -> None:
        """Nobody waits for chunks."""

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        told = self.told.setdefault(request.id.request_id, [])
        told += [token.token_id for token in tokens]

    def finished(self, request: Request, reason: FinishReason) -> None:
        self.open -= 1

    def gave_up(self, request: Request, error: KvferryError) -> None:
        raise error


class _Bench:
    """One model and KV; an engine with drafts and one without over both."""

    def __init__(self, max_draft: int) -> None:
        directory = resolve_model(BUNDLED_MODEL, progress=True)
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        layout = load_spec(directory).kv_layout(KvDType.FLOAT32, PAGE_SIZE)
        config = CacheConfig(page_size=PAGE_SIZE, rows=16)
        self._kv_cache = assemble_kv_cache(layout, config, _SLOTS, _CONTEXT)
        self._runner = ModelRunner(directory, self._kv_cache.pool, threads=1, dtype=DType.FLOAT32)
        self._runner.warm_up()
        self._max_draft = max_draft
        self._asked = 0

    def compare(
        self, prompt: str, text: str, batch: int, tokens: int, rounds: int
    ) -> dict[str, object]:
        """A line of the report."""
        prompts = [
            np.asarray(self._tokenizer.encode(text.format(name=name)).ids, dtype=np.int32)
            for name in _NAMES[:batch]
        ]
        times: dict[bool, list[float]] = {False: [], True: []}
        told: dict[bool, list[list[int]]] = {}
        drafts = drafts_of(NgramConfig(max_draft=self._max_draft))
        assert drafts is not None, "a length of drafts above 0"
        for _ in range(rounds):
            for guesses in (False, True):
                taken, told[guesses] = self._answer(prompts, tokens, drafts if guesses else None)
                times[guesses].append(taken)
        plain, drafted = min(times[False]), min(times[True])
        return {
            "what": "speculation",
            "prompt": prompt,
            "batch": batch,
            "plain_ms": round(plain, 1),
            "drafts_ms": round(drafted, 1),
            "ratio": round(drafted / plain, 2),
            "accepted": drafts.counters["draft_tokens_accepted"] // rounds,
            "drafted": drafts.counters["draft_tokens"] // rounds,
            "same": sum(a == b for a, b in zip(told[False], told[True], strict=True)),
        }

    def _answer(
        self, prompts: list[TokenIds], tokens: int, drafts: Drafts | None
    ) -> tuple[float, list[list[int]]]:
        """CPU ms per token once all prompts are computed, and the answers."""
        engine = Engine(
            self._kv_cache, self._runner, SchedulerConfig(), MonotonicClock(), drafts=drafts
        )
        listener = _Answers()
        names = [f"r{self._asked + number}" for number in range(len(prompts))]
        self._asked += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            engine.submit(_request(name, prompt, tokens, listener))
        listener.open = len(prompts)
        while len(listener.told) < len(prompts):
            engine.step()
        before = sum(map(len, listener.told.values()))
        started = thread_cpu_s()
        while listener.open:
            engine.step()
        seconds = thread_cpu_s() - started
        decoded = len(prompts) * tokens - before
        return 1e3 * seconds / decoded, [listener.told[name] for name in names]


def _request(name: str, prompt: TokenIds, tokens: int, listener: _Answers) -> Request:
    return Request(
        id=AttemptId(RequestId(name), Attempt(1)),
        prompt=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        cache_use=CacheUse(ExtraKey("")),
        eos_token_ids=(),
        listener=listener,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="answers at once")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", type=int, default=3, help="most tokens guessed at once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
