"""Clients whose whole answers are compared: they must not change while workers die."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from kvferry.rpc.v1 import inference_pb2 as inference
from kvferry.rpc.v1 import inference_pb2_grpc
from tests.support.digest_model import VOCAB

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER_WITHIN_S = 120.0
QUESTIONS = 21
_STOPS = tuple(range(60))
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 20, "maxLength": 60},
            "sizes": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 99999},
                "minItems": 3,
                "maxItems": 5,
            },
            "old": {"type": "boolean"},
        },
        "required": ["name", "sizes", "old"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True, slots=True)
class Said:
    """What a client saw of one sample."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[bytes, ...]
    reason: int
    stop_string: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer, without what may differ from run to run."""

    samples: tuple[Said, ...]
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended."""

    question: int
    reply: Reply | None
    attempt: int
    """The one that completed it; 0 for an error."""
    error: str


def questions(seed: int) -> list[Any]:
    """Requests of every kind; each is the same whenever and however often it is asked."""
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2, "min_tokens": 30, "stop_token_ids": _STOPS},
        {"temperature": 3.0, "logprobs": 0},
        {"temperature": 2.0, "top_p": 0.95, "frequency_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 3.0, "n": 3, "stop_token_ids": _STOPS[:8]},
        {"temperature": 3.0, "stop": ["7", "ab"], "min_tokens": 20},
        {"temperature": 3.0, "logprobs": 1, "json_schema": SCHEMA, "max_tokens": 400},
    ]
    return [
        inference.GenerateRequest(
            token_ids=inference.TokenIds(
                ids=[rng.randrange(1, VOCAB) for _ in range(rng.randrange(5, 200))]
            ),
            sampling=inference.SamplingParams(
                **{"ignore_eos": True, "seed": rng.getrandbits(60)}
                | {"max_tokens": rng.randrange(40, 120)}
                | kinds[number % len(kinds)]
            ),
        )
        for number in range(QUESTIONS)
    ]


def ask(address: str, question: int, request: Any) -> Outcome:
    """One request, to its end."""
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            responses = list(stub.Generate(request, timeout=ANSWER_WITHIN_S))
        except grpc.RpcError as error:
            return Outcome(question, None, 0, f"{error.code().name}: {error.details()}")
    usage = responses[-1].finish.usage
    samples = tuple(said(responses, index) for index in range(request.sampling.n or 1))
    reply = Reply(samples, usage.prompt_tokens, usage.completion_tokens)
    return Outcome(question, reply, usage.attempt, "")


def said(responses: Sequence[Any], index: int) -> Said:
    """What these responses say of one sample, which has ended in them."""
    mine = [response for response in responses if response.index == index]
    (finish,) = [response.finish for response in mine if response.HasField("finish")]
    return Said(
        tuple(token for response in mine for token in response.token_ids),
        "".join(response.text for response in mine),
        tuple(
            entry.SerializeToString(deterministic=True)
            for response in mine
            for entry in response.logprobs
        ),
        finish.reason,
        finish.stop_string,
    )


@dataclass(slots=True)
class Streams:
    """So many clients, each of which asks one question after the other until it is told to stop."""

    address: str
    requests: list[Any]
    expected: list[Reply]
    """Of an undisturbed run."""
    clients: int
    outcomes: list[Outcome] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(self.clients):
            rng = random.Random(number)
            thread = threading.Thread(target=self._run, args=(rng,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ask no more, wait for the answers."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * ANSWER_WITHIN_S)
            assert not thread.is_alive(), "a client hangs although its call has a deadline"

    def problems(self) -> list[str]:
        """Every answer that is not what it was without a fault."""
        found = []
        for outcome in self.outcomes:
            expected = self.expected[outcome.question]
            if outcome.reply is None:
                found.append(f"question {outcome.question} failed: {outcome.error}")
            elif outcome.reply != expected:
                found.append(f"question {outcome.question}: {outcome.reply}, not {expected}")
        return found

    def _run(self, rng: random.Random) -> None:
        while not self._stopping.is_set():
            question = rng.randrange(len(self.requests))
            self.outcomes.append(ask(self.address, question, self.requests[question]))
