"""Clients of a cluster on several nodes, who compare every answer with that of an undisturbed run.

Each asks one question after the other, at whichever router it finds.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.client import CallFailed, Client
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

END_WITHIN_S = 150.0
"""An answer that waits for a network that is cut for 20 s, on a busy machine."""
_REFUSED = "RESOURCE_EXHAUSTED"
_PAUSE_S = 0.2
"""Of a client that was refused."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a client saw of an answer, without what may differ from run to run."""

    samples: tuple[tuple[tuple[int, ...], str, int], ...]
    """Token ids, text and reason of the end of each."""
    completion_tokens: int


def mixed_questions(seed: int, count: int, tokens_max: int) -> list[inference.GenerateRequest]:
    """Short and long prompts, some with a common beginning; greedy, drawn, several samples."""
    rng = random.Random(seed)
    common = [rng.randrange(1000, 40_000) for _ in range(96)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.5},
        {"temperature": 1.0, "n": 2},
    ]
    made = []
    for number in range(count):
        own = [rng.randrange(1000, 40_000) for _ in range(rng.randrange(8, 200))]
        prompt = common + own if number % 3 == 0 else own
        sampling = kinds[number % len(kinds)] | {
            "seed": rng.getrandbits(60),
            "ignore_eos": True,
            "max_tokens": rng.randrange(tokens_max // 3, tokens_max),
        }
        made.append(
            inference.GenerateRequest(
                token_ids=inference.TokenIds(ids=prompt),
                sampling=inference.SamplingParams(**sampling),
            )
        )
    return made


def said(parts: Sequence[inference.GenerateResponse], samples: int) -> Said:
    """The whole answer."""
    found = []
    for index in range(samples):
        mine = [part for part in parts if part.index == index]
        (finish,) = [part.finish for part in mine if part.HasField("finish")]
        tokens = tuple(token for part in mine for token in part.token_ids)
        found.append((tokens, "".join(part.text for part in mine), finish.reason))
    return Said(tuple(found), parts[-1].finish.usage.completion_tokens)


def ask(client: Client, question: inference.GenerateRequest) -> Said:
    """Raises `CallFailed`."""
    return said(list(client.generate(question)), question.sampling.n or 1)


@dataclass(slots=True)
class MixedLoad:
    """So many clients; each begins with another router."""

    addresses: Sequence[str]
    questions: list[inference.GenerateRequest]
    clients: int
    expected: list[Said] = field(default_factory=list)
    right: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self) -> None:
        """Ask every question once; nothing must go wrong meanwhile."""
        with Client(*self.addresses) as client:
            self.expected = [ask(client, question) for question in self.questions]

    def start(self) -> None:
        assert self.expected, "`learn` comes first"
        for number in range(self.clients):
            thread = threading.Thread(target=self._run, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ask no more, wait for the answers."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(END_WITHIN_S)
            assert not thread.is_alive(), "an answer never ends"

    def wait_for_answers(self, count: int) -> None:
        """Until so many more have come, right or wrong."""
        enough = self._done() + count
        wait_until(f"{count} answers", lambda: self._done() >= enough, END_WITHIN_S)

    def _done(self) -> int:
        return self.right + len(self.problems)

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        first = number % len(self.addresses)
        addresses = (*self.addresses[first:], *self.addresses[:first])
        with Client(*addresses) as client:
            while not self._stopping.is_set():
                question = rng.randrange(len(self.questions))
                try:
                    answer = ask(client, self.questions[question])
                except CallFailed as error:
                    self._failed(question, str(error))
                    continue
                with self._lock:
                    if answer == self.expected[question]:
                        self.right += 1
                    else:
                        wrong = f"question {question}: {answer}, not {self.expected[question]}"
                        self.problems.append(wrong)

    def _failed(self, question: int, error: str) -> None:
        with self._lock:
            if error.startswith(_REFUSED):
                self.refused += 1
            else:
                self.problems.append(f"question {question} failed: {error}")
        self._stopping.wait(_PAUSE_S)
