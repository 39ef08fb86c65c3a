"""Clients of a fault test: greedy requests whose right answers are known, and their ends."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from kvferry.clock import MonotonicClock
from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.rpc.v1 import inference_pb2_grpc
from tests.support.digest_model import VOCAB, answer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPT_LENGTHS = (1, 7, 8, 9, 40, 120, 250, 400, 480)
TOKENS_MAX = (1, 2, 8, 24, 60)
FAMILIES = 5
"""Prompts of a family begin alike, so that some of a prompt is mostly cached."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its right answer."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    sharing: inference.Sharing = inference.SHARING_SHARED


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended."""

    question: Question
    tokens: tuple[int, ...]
    code: str
    """A status code's name; OK for an answer with a finish."""
    details: str
    took_s: float
    ended_at: float
    """Of the monotonic clock."""

    def problem(self, end_within_s: float) -> str | None:
        """What is not allowed; None for a right answer or a clear error after right tokens."""
        what = f"{len(self.question.prompt)} tokens -> {self.code} after {self.took_s:.1f} s"
        got = len(self.tokens)
        if self.tokens != self.question.expected[:got]:
            return f"WRONG TOKENS: {what}: {self.tokens} for {self.question.expected}"
        if self.took_s > end_within_s:
            return f"HANG: {what}: {self.details}"
        if self.code == "OK":
            return None if got == len(self.question.expected) else f"CUT SHORT: {what}"
        return None if self.code == "UNAVAILABLE" else f"UNCLEAR ERROR: {what}: {self.details}"


def digest_question(rng: random.Random) -> Question:
    """Of the digest model."""
    return _question(rng, rng.choice(PROMPT_LENGTHS), rng.choice(TOKENS_MAX))


def growing_question(rng: random.Random) -> Question:
    """Of a long answer: a few of them outgrow a decode worker, and the next handoff waits."""
    return _question(rng, rng.randrange(60, 160), rng.randrange(30, 220))


def _question(rng: random.Random, length: int, max_tokens: int) -> Question:
    family = random.Random(rng.randrange(FAMILIES))
    shared = [family.randrange(1, VOCAB) for _ in range(length // 2)]
    prompt = shared + [rng.randrange(1, VOCAB) for _ in range(length - len(shared))]
    return Question(tuple(prompt), tuple(answer(prompt, max_tokens)))


def ask(address: str, question: Question, timeout_s: float) -> Outcome:
    """One request, to its end."""
    clock = MonotonicClock()
    started = clock.now()
    tokens: list[int] = []
    code, details = "OK", ""
    request = inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=question.prompt),
        sampling=inference.SamplingParams(
            max_tokens=len(question.expected), temperature=0.0, ignore_eos=True
        ),
        sharing=question.sharing,
    )
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            for response in stub.Generate(request, timeout=timeout_s):
                tokens += response.token_ids
        except grpc.RpcError as error:
            code, details = error.code().name, error.details()
    ended_at = clock.now()
    return Outcome(question, tuple(tokens), code, details, ended_at - started, ended_at)


@dataclass(slots=True)
class Load:
    """Clients that ask one question after the other until they are told to stop."""

    address: str
    questions: Sequence[Callable[[], Question]]
    """One per client; called by that client's thread alone."""
    end_within_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin to ask."""
        for question in self.questions:
            thread = threading.Thread(target=self._run, args=(question,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> list[Outcome]:
        """Ask no more, wait for the answers."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * self.end_within_s)
            assert not thread.is_alive(), "a client hangs although its call has a deadline"
        return self.outcomes

    def problems(self) -> list[str]:
        """What ended as it must not."""
        found = [outcome.problem(self.end_within_s) for outcome in self.outcomes]
        return [problem for problem in found if problem is not None]

    def _run(self, question: Callable[[], Question]) -> None:
        while not self._stopping.is_set():
            self.outcomes.append(ask(self.address, question(), 1.5 * self.end_within_s))
