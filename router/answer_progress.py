"""What the client has of an answer, and what follows from an attempt that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import DeadlineExceeded, KvferryError, Overloaded, WorkerUnavailable
from kvferry.generation import SampleProgress
from kvferry.limits import ATTEMPT_FAILURES_MAX, ATTEMPTS_MAX

if TYPE_CHECKING:
    from kvferry.generation import AttemptOutput
    from kvferry.ids import TokenIds, WorkerId
    from router.policy import Route
    from router.request import ValidRequest
    from router.request_control import RequestControl


class AnswerProgress:
    """What the client has of an answer, and what the next attempt has to know of those before."""

    def __init__(self, request: ValidRequest, control: RequestControl) -> None:
        self._request = request
        self._control = control
        self._told: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self._ended: set[int] = set()
        self._new_tokens = 0
        """Of the attempt that runs."""
        self._failures = 0
        self._fruitless = 0
        """Failures in a row of attempts that brought no token."""
        self.stalled_since: float | None = None
        """When the first attempt failed since the last token."""
        self.failure: KvferryError | None = None
        """Why the attempt before failed."""
        self.avoid: frozenset[WorkerId] = frozenset()
        self.full: frozenset[WorkerId] = frozenset()
        """Decode workers that refused because they are overloaded; not asked twice."""

    @property
    def tokens_sent(self) -> int:
        """Tokens that the client has, of all samples."""
        return sum(map(len, self._told))

    @property
    def running(self) -> list[int]:
        """The samples that have not ended, at a worker or by a stop string."""
        ended = self._ended | self._control.ended_samples
        return [sample for sample in range(len(self._told)) if sample not in ended]

    @property
    def known(self) -> TokenIds:
        """int32, the prompt and what is known of the first sample that goes on: what a worker
        computes before the next token."""
        told = self._told[self.running[0]]
        if not told:
            return self._request.prompt
        return np.concatenate([self._request.prompt, np.asarray(told, dtype=np.int32)])

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the running samples take, the prompt's counted once."""
        return int(self._request.prompt.size) + sum(len(self._told[i]) for i in self.running)

    @property
    def answer_tokens_left(self) -> int:
        """Of the sample that has most left."""
        least = min(len(self._told[sample]) for sample in self.running)
        return self._request.sampling.max_tokens - least

    @property
    def resumed(self) -> tuple[SampleProgress, ...]:
        """Where the next attempt goes on; empty before the first token."""
        if not self.tokens_sent:
            return ()
        running = set(self.running)
        return tuple(
            SampleProgress(tuple(told), sample not in running)
            for sample, told in enumerate(self._told)
        )

    def took(self, output: AttemptOutput) -> None:
        """An output goes to the client."""
        self._told[output.sample] += [token.token_id for token in output.tokens]
        if output.finish is not None:
            self._ended.add(output.sample)
        if output.tokens:
            self._new_tokens += len(output.tokens)
            self._fruitless, self.stalled_since, self.full = 0, None, frozenset()

    def failed(self, error: KvferryError, route: Route, now: float) -> None:
        """Return if the request may be tried again, raise what the client is told otherwise."""
        if not error.status.retryable or isinstance(error, DeadlineExceeded):
            raise error
        self.failure = self._as_told(error)
        self.stalled_since = now if self.stalled_since is None else self.stalled_since
        if isinstance(error, Overloaded):
            self.full |= {route.decode.worker_id}
        # A refusal costs a worker nothing: an answer that has begun outwaits it.
        if not (isinstance(error, Overloaded) and self.tokens_sent):
            self._failures += 1
            self._fruitless += not self._new_tokens
        self._blame(route)
        if self._fruitless == ATTEMPTS_MAX or self._failures == ATTEMPT_FAILURES_MAX:
            raise self.failure from error

    def _as_told(self, error: KvferryError) -> KvferryError:
        if not self.tokens_sent:
            return error
        return WorkerUnavailable(f"the stream broke after {self.tokens_sent} tokens: {error}")

    def _blame(self, route: Route) -> None:
        # With the second token of a sample the prompt's KV had arrived: whoever computed it has no
        # part in what failed later, and has it in its cache.
        is_decoding = self._new_tokens > len(self._told)
        blamed = frozenset({route.decode.worker_id}) if is_decoding else route.workers
        self.avoid = blamed if self._new_tokens else self.avoid | blamed
        self._new_tokens = 0
