"""Clients that ask a real cluster the same questions all the time, and compare its answers."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from cluster.client import CallFailed, Client
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTIONS = ("Three rivers:", "The capital of France is", "One, two, three,")
_ANSWER_TOKENS = 40
_ENOUGH_S = 120.0


class AskingClients:
    """Each asks one question again and again, until `stop`."""

    def __init__(self, address: str, questions: tuple[str, ...] = QUESTIONS) -> None:
        """Asks each question once, undisturbed; these answers are the right ones."""
        self.address = address
        self.told: list[tuple[str, str]] = []
        """Question and answer, or what went wrong."""
        self._expected = {question: self.answer_of(question) for question in questions}
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[each]) for each in questions]

    def answer_of(self, question: str) -> str:
        """One answer, by a client of its own."""
        request = inference.GenerateRequest(
            text=question,
            sampling=inference.SamplingParams(
                max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True
            ),
        )
        with Client(self.address) as client:
            return "".join(response.text for response in client.generate(request))

    def wait_for_answers(self, more: int) -> None:
        """Until so many more questions have been answered, right or wrong."""
        enough = len(self.told) + more
        wait_until("answers", lambda: len(self.told) >= enough, _ENOUGH_S, state=lambda: self.told)

    def assert_all_right(self) -> None:
        """No failure and no other answer than without a disturbance."""
        assert self.told, "nobody was answered"
        assert {pair for pair in self.told if pair[1] != self._expected[pair[0]]} == set()

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the last answers."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(_ENOUGH_S)

    def _ask(self, question: str) -> None:
        while not self._is_over.is_set():
            try:
                self.told.append((question, self.answer_of(question)))
            except CallFailed as failure:
                self.told.append((question, f"failed: {failure}"))


@contextlib.contextmanager
def asking_clients(address: str, questions: tuple[str, ...] = QUESTIONS) -> Iterator[AskingClients]:
    """They ask inside; what they were told is complete afterwards."""
    clients = AskingClients(address, questions)
    clients.start()
    try:
        yield clients
    finally:
        clients.stop()
    clients.assert_all_right()
