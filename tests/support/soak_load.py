"""Clients that ask a cluster with the real model for everything it can do, until told to stop."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import openai

from kvferry.clock import MonotonicClock
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.rpc.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ANSWER_WITHIN_S = 300.0
MODEL = "SmolLM2-135M-Instruct"
PREFIXES = 6
PREFIX_TOKENS = 480
LONG_TOKENS = (1500, 2500)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 24},
            "sizes": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 999},
                "minItems": 2,
                "maxItems": 4,
            },
        },
        "required": ["name", "sizes"],
        "additionalProperties": False,
    }
)


@dataclass(slots=True)
class SoakLoad:
    """`clients` threads; each asks one kind of request after the other. A context manager."""

    address: str
    openai_url: str
    text: Sequence[int]
    """Tokens of which prompts are cut; more than the longest of them."""
    clients: int
    ended: Counter[str] = field(default_factory=Counter)
    """Requests that ended as they should, by kind."""
    problems: list[str] = field(default_factory=list)
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start, tokens) of every message that brought any."""
    _clock: MonotonicClock = field(default_factory=MonotonicClock)
    _began: float = 0.0
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> SoakLoad:
        self._began = self._clock.now()
        for number in range(self.clients):
            thread = threading.Thread(target=self._run, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ask no more, wait for the answers."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * ANSWER_WITHIN_S)
            if thread.is_alive():
                self.problems.append("a client hangs although its call has a deadline")

    def tokens_between(self, start_s: float, stop_s: float) -> int:
        """Tokens that came in a part of the time."""
        return sum(count for at_s, count in self.tokens if start_s <= at_s < stop_s)

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        with grpc.insecure_channel(self.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            kinds: dict[str, Callable[[], None]] = {
                "shared prefix": lambda: self._answer(stub, self._shared(rng), rng),
                "long prompt": lambda: self._answer(stub, self._long(rng), rng, max_tokens=16),
                "samples": lambda: self._answer(stub, self._shared(rng), rng, n=3),
                "schema": lambda: self._object(stub, rng),
                "repeating": lambda: self._answer(stub, self._repeating(rng), rng, temperature=0.0),
                "left": lambda: self._leave(stub, rng),
                "cancelled": lambda: self._cancel(stub, rng),
                "openai": lambda: self._chat(rng),
            }
            # Each begins with another kind, so that all are tried however slow the machine is.
            for turn in itertools.count(number):
                if self._stopping.is_set():
                    return
                kind = list(kinds)[turn % len(kinds)]
                try:
                    kinds[kind]()
                    self.ended[kind] += 1
                except grpc.RpcError as error:
                    self.problems.append(f"{kind}: {error.code().name}: {error.details()}")
                except (AssertionError, ValueError, openai.OpenAIError) as error:
                    self.problems.append(f"{kind}: {error!r}")

    # --- prompts

    def _shared(self, rng: random.Random) -> list[int]:
        """One of a few beginnings and a question of its own."""
        start = 100 * rng.randrange(PREFIXES)
        question = rng.randrange(len(self.text) - 60)
        length = rng.randrange(8, 60)
        return [
            *self.text[start : start + PREFIX_TOKENS],
            *self.text[question : question + length],
        ]

    def _long(self, rng: random.Random) -> list[int]:
        """Shares nothing with any other."""
        length = rng.randrange(*LONG_TOKENS)
        start = rng.randrange(len(self.text) - length)
        return [
            *(rng.randrange(1000, 40_000) for _ in range(4)),
            *self.text[start : start + length],
        ]

    def _repeating(self, rng: random.Random) -> list[int]:
        """Of which the rest of an answer can be guessed."""
        start = rng.randrange(len(self.text) - 40)
        return list(self.text[start : start + 40]) * 4

    # --- requests

    def _request(
        self, ids: list[int], rng: random.Random, **sampling: Any
    ) -> inference.GenerateRequest:
        given = {"temperature": 0.8, "ignore_eos": True, "max_tokens": rng.randrange(8, 64)}
        return inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=ids),
            sampling=inference.SamplingParams(**(given | {"seed": rng.getrandbits(60)} | sampling)),
        )

    def _answer(self, stub: Any, ids: list[int], rng: random.Random, **sampling: Any) -> None:
        request = self._request(ids, rng, **sampling)
        ends: list[int] = []
        counts: Counter[int] = Counter()
        for response in stub.Generate(request, timeout=ANSWER_WITHIN_S):
            self._note(len(response.token_ids))
            counts[response.index] += len(response.token_ids)
            if response.HasField("finish"):
                ends.append(response.index)
        samples = request.sampling.n or 1
        assert sorted(ends) == list(range(samples)), f"{samples} samples, ends of {ends}"
        expected = dict.fromkeys(range(samples), request.sampling.max_tokens)
        assert counts == expected, f"{counts} tokens, not {expected}"

    def _object(self, stub: Any, rng: random.Random) -> None:
        request = self._request(
            self._shared(rng), rng, json_schema=SCHEMA, ignore_eos=False, max_tokens=400
        )
        text = []
        for response in stub.Generate(request, timeout=ANSWER_WITHIN_S):
            self._note(len(response.token_ids))
            text.append(response.text)
        assert json.loads("".join(text)).keys() == {"name", "sizes"}

    def _leave(self, stub: Any, rng: random.Random) -> None:
        """Somewhere in the prompt or in the answer, without a word."""
        prompt = self._long(rng) if rng.random() < 0.5 else self._shared(rng)
        call = stub.Generate(self._request(prompt, rng), timeout=ANSWER_WITHIN_S)
        if rng.random() < 0.5:
            self._stopping.wait(rng.uniform(0.0, 1.0))
            call.cancel()
            return
        wanted = rng.randrange(1, 8)
        for response in call:
            self._note(len(response.token_ids))
            wanted -= 1
            if wanted == 0:
                call.cancel()
                return

    def _cancel(self, stub: Any, rng: random.Random) -> None:
        """By id, while the answer comes; it may have ended just before."""
        request = self._request(self._shared(rng), rng)
        request.request_id = f"soak-{rng.getrandbits(60):x}"
        reasons = []
        for response in stub.Generate(request, timeout=ANSWER_WITHIN_S):
            self._note(len(response.token_ids))
            if response.HasField("finish"):
                reasons.append(response.finish.reason)
            else:
                stub.Cancel(inference.CancelRequest(request_id=request.request_id), timeout=60)
        allowed = {inference.FINISH_REASON_CANCELLED, inference.FINISH_REASON_LENGTH}
        assert len(reasons) == 1, f"{len(reasons)} ends"
        assert reasons[0] in allowed, f"ended by {reasons[0]}"

    def _chat(self, rng: random.Random) -> None:
        """Two turns over the other front door, with a client of its own."""
        messages: list[Any] = [
            {"role": "system", "content": "You are a friendly assistant. Answer in one sentence."}
        ]
        with openai.OpenAI(base_url=self.openai_url, api_key="none", max_retries=0) as client:
            for question in ("What is a hen?", f"And what would {rng.randrange(100)} of them eat?"):
                messages.append({"role": "user", "content": question})
                events = client.chat.completions.create(
                    model=MODEL, messages=messages, max_tokens=24, stream=True
                )
                said = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
                assert said, "an answer without text"
                messages.append({"role": "assistant", "content": said})

    def _note(self, count: int) -> None:
        if count:
            self.tokens.append((self._clock.now() - self._began, count))
