"""Attempts that routers sent: fetch the prompt's KV or compute it here, then stream tokens.

An attempt with a source waits until its KV is expected to fit here; only then is its source asked
to compute it. A source whose offer is refused for too long (others outran their promises) is let
go, and the prompt computed here: slower, but the attempt does not fail for lack of room.

An attempt may go on where another one broke off (`AttemptRequest.resumed`). Each of its samples is
a request of its own with known tokens. A source computes what the first of them knows, as if it
were a prompt; the others follow when that KV is here, find the prompt in the cache and compute the
rest. Where nothing is cached, each computes all it knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decode_worker.attempt_times import AttemptTimes, Mark
from engine.request import Request, Stage
from kv_transfer.protocol.deadlines import OFFER_WINDOW_S
from kv_transfer.protocol.key import HandoffKey
from kvferry.errors import DuplicateRequest, KvferryError, Overloaded, RequestCancelled
from kvferry.generation import (
    AttemptFinish,
    AttemptOutput,
    AttemptUsage,
    FinishReason,
    OutputToken,
)
from kvferry.sampling import SamplingParams

if TYPE_CHECKING:
    from decode_worker.attempt_stream import AttemptStream, Outbox
    from decode_worker.return_source import ReturnSource
    from engine.engine import Engine
    from kv_transfer.driver import HandoffDriver
    from kvferry.generation import AttemptRequest, PrefillSource
    from kvferry.ids import AttemptId, Incarnation
    from mem_cache.request_kv import RequestKV


_ANY_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
"""For a source whose choice is of no interest: the next token is known."""

OFFER_PATIENCE_S = 0.5 * OFFER_WINDOW_S
"""An offer refused for so long is declined, well before its source gives up by itself."""


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """Event: a router sent an attempt."""

    attempt: AttemptRequest
    stream: AttemptStream
    accepted_at: float
    """When it came, on the engine's clock; it may wait for the end of a step."""


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """Event: the router no longer wants an attempt. Unknown and ended ones are ignored."""

    id: AttemptId
    stream: AttemptStream


@dataclass(frozen=True, slots=True)
class EndSample:
    """Event: the router needs no more of one sample. Unknown and ended ones are ignored."""

    id: AttemptId
    sample: int


@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt in flight.

    `source` is set until its handoff begins, `key` from then until it ends.
    """

    request: Request
    """Of sample 0, those of the others are its siblings; of a resumed attempt that of the first
    sample that goes on."""
    stream: AttemptStream
    source: PrefillSource | None
    is_single: bool
    """Whether the client wants one sample only."""
    times: AttemptTimes
    waiting: list[Request] = field(default_factory=list)
    """Of a resumed attempt: other samples, until what they share with `request` is here."""
    others: list[Request] = field(default_factory=list)
    """Those that have followed it."""
    key: HandoffKey | None = None
    computed_by: PrefillSource | None = None
    """Who computed the prompt, once its handoff has begun."""
    refused_at: float | None = None
    """When an offer of its source was first refused."""
    firsts: tuple[OutputToken, ...] = ()
    """The source's tokens, one per sample, kept until the KV is adopted."""
    told_already: set[int] = field(default_factory=set)
    """Samples whose next token the client has."""
    unwanted: set[int] = field(default_factory=set)
    """Samples that were ended before they had parted from their prompt."""
    usage: AttemptUsage = field(default_factory=AttemptUsage)

    @property
    def has_parted(self) -> bool:
        """Whether each sample can be ended by itself."""
        return self.key is None and self.request.firsts_due == 1 and not self.waiting

    @property
    def requests(self) -> tuple[Request, ...]:
        """What the engine knows of it."""
        return (*self.request.samples, *self.others)


class Intake:
    """The decode side of a worker: `SinkHost` of the handoff driver and a `LoopPart`.

    Each attempt is in `_attempts` from `StartAttempt` until its one end, and its stream gets
    exactly one end: an output with `finish`, or an error.
    """

    def __init__(
        self,
        engine: Engine,
        driver: HandoffDriver,
        incarnation: Incarnation,
        outbox: Outbox,
        returns: ReturnSource | None = None,
    ) -> None:
        """`returns`: told of every answer whose prompt another worker computed."""
        self._engine = engine
        self._driver = driver
        self._incarnation = incarnation
        self._outbox = outbox
        self._returns = returns
        self._attempts: dict[AttemptId, _Attempt] = {}
        self._by_key: dict[HandoffKey, _Attempt] = {}

    # --- events from the gRPC server -----------------------------------------------------------

    def handle(self, event: object) -> bool:
        """Takes `StartAttempt`, `CancelAttempt` and `EndSample`."""
        match event:
            case StartAttempt(attempt, stream, accepted_at):
                self._start(attempt, stream, AttemptTimes(self._engine.clock, accepted_at))
            case CancelAttempt(attempt_id, stream):
                self._cancel(attempt_id, stream)
            case EndSample(attempt_id, sample):
                self._end_sample(attempt_id, sample)
            case _:
                return False
        return True

    def tick(self) -> None:
        """Have KV sent that is expected to fit; decline offers that were refused for too long.

        Other deadlines of attempts are the router's; those of handoffs are the driver's.
        """
        while (request := self._engine.next_expected()) is not None:
            self._fetch(self._attempts[request.id])
        latest = self._engine.clock.now() - OFFER_PATIENCE_S
        for entry in list(self._by_key.values()):
            if entry.refused_at is not None and entry.refused_at <= latest:
                self._compute_here(entry)

    def next_deadline(self) -> float | None:
        """None: `tick` is called often enough."""
        return None

    def flush(self) -> None:
        """Send the tokens and ends that were made since the last call."""
        self._outbox.flush()

    def stop(self, error: KvferryError) -> None:
        """End every stream with `error`."""
        for entry in self._attempts.values():
            self._outbox.put(entry.stream, error)

    # --- SinkHost ------------------------------------------------------------------------------

    def reserve(self, key: HandoffKey, prompt_tokens: int) -> RequestKV | None:
        """Row and slots for KV that is ready to be sent; None while there is no space."""
        entry = self._by_key[key]
        request = entry.request
        assert prompt_tokens == request.inbound_len, f"{key}: {prompt_tokens} tokens offered"
        entry.times.note(Mark.READY)
        if request.kv is None and not self._engine.reserve_inbound(request):
            if entry.refused_at is None:
                entry.refused_at = self._engine.clock.now()
            return None
        entry.refused_at = None
        entry.times.note(Mark.GRANTED)
        return request.kv

    def first_tokens(self, key: HandoffKey, tokens: tuple[OutputToken, ...]) -> None:
        """Stream the source's tokens at once; the rest of the KV may still be on its way. Of an
        answer that goes on, the source's token is one that the client has.

        Raises `InvalidInput` for what is no token of the model, and unless each sample has one.
        """
        entry = self._by_key[key]
        self._engine.check_firsts(entry.request, tokens)
        entry.firsts = tokens
        if not entry.request.output.size:
            self.tokens(entry.request, tokens)

    def adopted(self, key: HandoffKey, usage: AttemptUsage) -> None:
        """All KV is here and ours: decode."""
        entry = self._by_key.pop(key)
        assert entry.firsts, f"{key}: adopted without a first token"
        entry.key = None
        entry.times.note(Mark.ADOPTED)
        self._tell_usage(entry, usage)
        self._let_follow(entry)
        self._engine.adopt(entry.request, entry.firsts)
        for sample in entry.unwanted:
            self._end_sample(entry.request.id, sample)

    def failed(self, key: HandoffKey, error: KvferryError) -> None:
        """The KV will not arrive: give the reservation back and tell the router."""
        entry = self._by_key.pop(key)
        entry.key = None
        self._end_requests(entry)
        self._close(entry, error)

    # --- RequestListener -----------------------------------------------------------------------

    def admitted(self, request: Request) -> None:
        """Prefill here begins."""
        kv, entry = request.held_kv, self._attempts[request.id]
        usage = AttemptUsage(
            prefill_hit_tokens=kv.prefix_len - kv.host_hit_len, host_hit_tokens=kv.host_hit_len
        )
        entry.times.note(Mark.ADMITTED)
        self._tell_usage(entry, usage)

    def computing(self, request: Request, tokens: int, layers: int) -> None:
        """Nobody else waits for a prompt computed here."""

    def computed(self, request: Request) -> None:
        """A chunk of a prompt computed here; nobody else waits for it."""

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        """One more token of one sample, or the first ones of all."""
        entry = self._attempts[request.id]
        entry.times.note(Mark.FIRST_TOKEN)
        for sample, token in enumerate(tokens, request.sample):
            if sample in entry.told_already:
                entry.told_already.remove(sample)
            else:
                self._outbox.put(entry.stream, AttemptOutput((token,), sample=sample))

    def finished(self, request: Request, reason: FinishReason) -> None:
        """One sample is complete; the attempt is when all are."""
        entry = self._attempts[request.id]
        end = AttemptOutput((), AttemptFinish(reason, entry.usage), sample=request.sample)
        if all(sample.stage is Stage.ENDED for sample in entry.requests):
            self._close(entry, end)
            # Of several samples nobody knows which one the conversation goes on with.
            if self._returns and entry.computed_by and entry.is_single:
                self._returns.offer(entry.request, entry.computed_by)
        else:
            self._outbox.put(entry.stream, end)

    def gave_up(self, request: Request, error: KvferryError) -> None:
        """Its constraint let one sample go no further; that ends the attempt."""
        entry = self._attempts[request.id]
        self._end_requests(entry)
        self._close(entry, error)

    # --- the attempt's life --------------------------------------------------------------------

    def _start(self, attempt: AttemptRequest, stream: AttemptStream, times: AttemptTimes) -> None:
        if attempt.id in self._attempts:
            self._outbox.put(stream, DuplicateRequest(str(attempt.id)))
            return
        try:
            # Before anything is made of it: sizes follow from these numbers.
            self._engine.check_input(attempt.prompt, attempt.sampling)
            self._engine.check_adapter(attempt.cache_use.adapter)
            self._engine.check_resumed(attempt.sampling, attempt.resumed)
            if len(self._attempts) >= self._engine.attempts_max:
                raise Overloaded(f"{len(self._attempts)} requests are in this worker", 1.0)
        except KvferryError as error:
            self._outbox.put(stream, error)
            return
        entry = self._attempt(attempt, stream, times)
        self._attempts[attempt.id] = entry
        try:
            if attempt.source is None:
                self._engine.submit(entry.request)
                self._let_follow(entry)
            else:
                self._engine.submit_inbound(entry.request)
        except KvferryError as error:
            self._close(entry, error)

    def _attempt(
        self, attempt: AttemptRequest, stream: AttemptStream, times: AttemptTimes
    ) -> _Attempt:
        """With one request for all samples, or, if they go on, one for each that has not ended."""
        is_single = attempt.sampling.n == 1
        if not attempt.resumed:
            request = self._new_request(attempt)
            return _Attempt(request, stream, attempt.source, is_single, times)
        requests: list[Request] = []
        only_end_missing: set[int] = set()
        for sample, progress in enumerate(attempt.resumed):
            if progress.is_done:
                continue
            request = self._new_request(attempt)
            request.resume(sample, progress.token_ids)
            if request.finish_reason() is not None:
                # Why it ended may be known to its constraint alone: choosing the last token again
                # shows it.
                only_end_missing.add(sample)
                request = self._new_request(attempt)
                request.resume(sample, progress.token_ids[:-1])
            # What was found of the first one's tokens is told of the whole attempt.
            request.announced = bool(requests)
            requests.append(request)
        first, *others = requests
        entry = _Attempt(first, stream, attempt.source, is_single, times, others)
        entry.told_already = only_end_missing
        return entry

    def _new_request(self, attempt: AttemptRequest) -> Request:
        request = Request(
            id=attempt.id,
            prompt=attempt.prompt,
            sampling=attempt.sampling,
            cache_use=attempt.cache_use,
            eos_token_ids=self._engine.eos_token_ids,
            listener=self,
        )
        request.goes_first = attempt.goes_first
        return request

    def _let_follow(self, entry: _Attempt) -> None:
        """Queue the other samples of a resumed attempt, in their order of arrival."""
        entry.others, entry.waiting = entry.waiting, []
        for request in entry.others:
            self._engine.submit_sample(request)

    def _fetch(self, entry: _Attempt) -> None:
        """Begin the handoff of an attempt for whose KV room is kept."""
        request, source = entry.request, entry.source
        assert source is not None, f"{request.id} has no source to be fetched from"
        key = HandoffKey(
            request_id=request.id.request_id,
            attempt=request.id.attempt,
            source_incarnation=source.incarnation,
            sink_incarnation=self._incarnation,
        )
        entry.source, entry.computed_by, entry.key = None, source, key
        self._by_key[key] = entry
        entry.times.note(Mark.FETCHED)
        known = request.known[: request.inbound_len]
        sampling = _ANY_TOKEN if request.output.size else request.sampling
        try:
            self._driver.fetch(
                key, source, known, sampling, request.cache_use, goes_first=request.goes_first
            )
        except KvferryError as error:
            self.failed(key, error)

    def _compute_here(self, entry: _Attempt) -> None:
        """Decline the source's offer. It has sent nothing yet: a first token follows a grant."""
        assert entry.key is not None, f"{entry.request.id} has no handoff"
        self._driver.abort_fetch(entry.key, "no room for its KV; the prompt is computed here")
        del self._by_key[entry.key]
        entry.key = entry.computed_by = entry.refused_at = None
        self._engine.compute_here(entry.request)
        self._let_follow(entry)

    def _cancel(self, attempt_id: AttemptId, stream: AttemptStream) -> None:
        entry = self._attempts.get(attempt_id)
        # A second call with the id of a running attempt was refused; its end is not ours.
        if entry is None or entry.stream is not stream:
            return
        if entry.key is not None:
            self._driver.abort_fetch(entry.key, "cancelled")
            del self._by_key[entry.key]
            entry.key = None
        self._end_requests(entry)
        self._close(entry, RequestCancelled("cancelled by the router"))

    def _end_sample(self, attempt_id: AttemptId, sample: int) -> None:
        entry = self._attempts.get(attempt_id)
        if entry is None:
            return
        if not entry.has_parted:
            entry.unwanted.add(sample)
            return
        for request in entry.requests:
            if request.sample == sample and request.stage is not Stage.ENDED:
                self._engine.end(request)
                self.finished(request, FinishReason.STOP)

    def _tell_usage(self, entry: _Attempt, usage: AttemptUsage) -> None:
        """At once and not with the end, which the router may cut off by a stop string."""
        entry.usage = usage
        output = AttemptOutput((), usage=usage, marks=entry.times.marks(usage.source_marks))
        self._outbox.put(entry.stream, output)

    def _end_requests(self, entry: _Attempt) -> None:
        for request in entry.requests:
            if request.stage is not Stage.ENDED:
                self._engine.end(request)

    def _close(self, entry: _Attempt, end: AttemptOutput | KvferryError) -> None:
        """The one end of an attempt, and how it came to it."""
        del self._attempts[entry.request.id]
        entry.times.note(Mark.ENDED)
        marks = entry.times.marks(entry.usage.source_marks)
        if isinstance(end, AttemptOutput):
            self._outbox.put(entry.stream, end._replace(marks=marks))
        else:
            self._outbox.put(entry.stream, AttemptOutput((), marks=marks))
            self._outbox.put(entry.stream, end)
