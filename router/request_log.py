"""What a router remembers of requests: their attempts, phases and ends. Bounded, never persistent.

    log.running()        those in flight, the oldest first
    log.recent(20)       those that ended last, the latest first
    log.find(name)       one by its request id or trace id

A record is written on the router's event loop while its request runs, and is complete when
`ended_at` is set. `router.timeline` makes spans of it. Times are of the router's clock, in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvferry.clock import unix_time_s
from kvferry.errors import ErrorKind, KvferryError
from kvferry.limits import ATTEMPTS_REMEMBERED_MAX, ERROR_TEXT_CHARACTERS_KEPT
from kvferry.trace_context import begin_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.attempt_marks import AttemptMarks
    from kvferry.clock import Clock
    from kvferry.generation import AttemptOutput, AttemptUsage
    from kvferry.ids import Attempt, RequestId, WorkerId
    from kvferry.trace_context import TraceContext
    from kvferry.tracing_config import TracingConfig
    from router.policy import Route
    from router.request import ClientRequest, Finish, Usage


class Outcome(Enum):
    """How a request ended."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    """Its client asked for the end."""
    CLIENT_GONE = "client_gone"
    REFUSED = "refused"
    """By limits, before any worker was asked."""
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class AttemptRecord:
    """One try of a request at one decode worker."""

    number: Attempt
    decode_worker: WorkerId
    prefill_worker: WorkerId | None
    """None: the decode worker computes the prompt itself."""
    started_at: float
    prefill_tokens: int = 0
    """Of the prompt, what had to be computed."""
    first_token_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    """Of the answer, that this attempt brought."""
    usage: AttemptUsage | None = None
    """Where the prompt's KV came from, once that is known."""
    marks: AttemptMarks | None = None
    """The last that its worker told."""
    error: str = ""
    """Why it failed; empty: it did not."""
    error_kind: ErrorKind | None = None

    def took(self, output: AttemptOutput, clock: Clock) -> None:
        """An output came."""
        if output.tokens:
            self.tokens += len(output.tokens)
            if self.first_token_at is None:
                self.first_token_at = clock.now()
        if output.usage is not None:
            self.usage = output.usage
        elif output.finish is not None:
            self.usage = output.finish.usage
        if output.marks is not None:
            self.marks = output.marks

    def failed(self, error: KvferryError) -> None:
        """It ends with this."""
        self.error, self.error_kind = _short(error), error.kind


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request of a client."""

    request_id: RequestId
    trace: TraceContext
    """Its own span."""
    parent: TraceContext | None
    """The span of its client, if that named one."""
    model: str
    tenant: str
    service_class: str
    max_tokens: int
    arrived_at: float
    arrived_unix_s: float
    work_id: RequestId | None = None
    """By which workers and their logs know it: clients choose and reuse theirs."""
    prompt_tokens: int = 0
    """0 until it is tokenized."""
    prepared_at: float | None = None
    """Tokenized, and its constraint checked."""
    placed_at: float | None = None
    """It has its places and goes to a worker."""
    first_token_at: float | None = None
    ended_at: float | None = None
    outcome: Outcome = Outcome.RUNNING
    error: str = ""
    """What the client was told; empty if it was no error."""
    error_kind: ErrorKind | None = None
    attempts: list[AttemptRecord] = field(default_factory=list)
    attempts_left_out: int = 0
    """Beyond `ATTEMPTS_REMEMBERED_MAX`; the first and the last are there."""
    usage: Usage | None = None
    """What it cost, once it has ended well."""
    finish_reasons: list[str] = field(default_factory=list)
    """Of its samples, in the order of their ends."""

    @property
    def failures(self) -> int:
        """Attempts that failed, those left out included."""
        return self.attempts_left_out + sum(bool(each.error) for each in self.attempts)

    def prepared(self, prompt_tokens: int, now: float) -> None:
        """Its prompt is known."""
        self.prompt_tokens, self.prepared_at = prompt_tokens, now

    def answered(self, finish: Finish) -> None:
        """A sample has its last token; with the last of them the whole is known."""
        self.finish_reasons.append(finish.reason.value)
        self.usage = finish.usage
        if finish.usage is not None:
            # From here on it has succeeded, even if its client leaves without a look.
            self.outcome = Outcome.SUCCEEDED

    @contextlib.contextmanager
    def attempt(self, number: Attempt, route: Route, clock: Clock) -> Iterator[AttemptRecord]:
        """An attempt that runs while inside."""
        source = None if route.prefill is None else route.prefill.worker_id
        decode, now = route.decode.worker_id, clock.now()
        entry = AttemptRecord(number, decode, source, now, route.prefill_tokens)
        self.attempts.append(entry)
        if len(self.attempts) > ATTEMPTS_REMEMBERED_MAX:
            del self.attempts[ATTEMPTS_REMEMBERED_MAX // 2]
            self.attempts_left_out += 1
        try:
            yield entry
        except KvferryError as error:
            entry.failed(error)
            raise
        finally:
            entry.ended_at = clock.now()
            if self.first_token_at is None:
                self.first_token_at = entry.first_token_at


class RequestLog:
    """The requests of one router."""

    def __init__(self, clock: Clock, config: TracingConfig) -> None:
        self.on_end: list[Callable[[RequestRecord], None]] = []
        """Called with each complete record, on the event loop. May neither wait nor raise."""
        self._clock = clock
        self._config = config
        self._running: dict[RequestId, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=config.requests_kept)
        # Apart, so that a flood of refused ones leaves the others.
        self._refused: deque[RequestRecord] = deque(maxlen=config.requests_kept)

    def running(self) -> tuple[RequestRecord, ...]:
        """Those in flight, the oldest first."""
        return tuple(self._running.values())

    def recent(self, count_max: int) -> list[RequestRecord]:
        """Those that ended last, the latest first; of the refused ones as many as of the others."""
        kept = [*_last(self._ended, count_max), *_last(self._refused, count_max)]
        kept.sort(key=lambda record: record.ended_at or 0.0, reverse=True)
        return kept[:count_max]

    def find(self, name: str) -> RequestRecord | None:
        """The last request of that id, or of the trace of that id; one in flight comes first."""
        for records in (self._running.values(), reversed(self._ended), reversed(self._refused)):
            for record in records:
                if name in (record.request_id, record.trace.trace_id):
                    return record
        return None

    def in_flight(self, request_id: RequestId) -> RequestRecord | None:
        """The request of that id, while it runs."""
        return self._running.get(request_id)

    @contextlib.contextmanager
    def following(
        self, request_id: RequestId, request: ClientRequest, arrived_at: float
    ) -> Iterator[RequestRecord]:
        """Keep the record of a request that runs while inside. No other in flight has its id."""
        record = self._begin(request_id, request, arrived_at)
        self._running[request_id] = record
        try:
            yield record
            self._close(record, Outcome.SUCCEEDED)
        except KvferryError as error:
            record.error, record.error_kind = _short(error), error.kind
            refused = error.kind is ErrorKind.OVERLOADED and not record.attempts
            self._close(record, Outcome.REFUSED if refused else Outcome.FAILED)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self._close(record, Outcome.CLIENT_GONE)
            raise
        finally:
            # A fault of ours.
            self._close(record, Outcome.FAILED)
            del self._running[request_id]

    def _begin(
        self, request_id: RequestId, request: ClientRequest, arrived_at: float
    ) -> RequestRecord:
        parent = request.trace
        trace = begin_trace(self._config.sample_ratio) if parent is None else parent.child()
        return RequestRecord(
            request_id=request_id,
            trace=trace,
            parent=parent,
            model=request.model,
            tenant=request.tenant,
            service_class=request.service_class.value,
            max_tokens=request.sampling.max_tokens,
            arrived_at=arrived_at,
            arrived_unix_s=unix_time_s() - (self._clock.now() - arrived_at),
        )

    def _close(self, record: RequestRecord, outcome: Outcome) -> None:
        """Only the first call counts, but for the outcome that the record has by then."""
        if record.ended_at is not None:
            return
        record.ended_at = self._clock.now()
        if record.outcome is Outcome.RUNNING:
            record.outcome = outcome
        kept = self._refused if record.outcome is Outcome.REFUSED else self._ended
        kept.append(record)
        for tell in self.on_end:
            tell(record)


def _last(records: deque[RequestRecord], count_max: int) -> list[RequestRecord]:
    return [record for record, _ in zip(reversed(records), range(count_max), strict=False)]


def _short(error: KvferryError) -> str:
    return str(error)[:ERROR_TEXT_CHARACTERS_KEPT]
