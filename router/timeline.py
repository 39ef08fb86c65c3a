"""The timeline of one request: spans within spans, made of what the router's log has. Pure.

    request
      tokenize, queue                     the router
      route                               until workers are chosen
      attempt 1                           one try; an error if it failed
        wait                              until the decode worker expects to have room
        handoff                           from asking the source to owning the KV
          prefill.queue, prefill          the source
          transfer                        from the room for it to the last of it; beside prefill
        prefill                           instead of a handoff: computed by the decode worker
        decode
      route, attempt 2 ...

Workers tell seconds since they heard of the attempt, each by its own clock. Of what the router
waited more than that, half is taken to have passed on the way there, half on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from router.request_log import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvferry.attempt_marks import AttemptMarks
    from router.request_log import AttemptRecord, RequestRecord

Attributes: TypeAlias = "Mapping[str, str | int | float | tuple[str, ...]]"

ROUTER = "router"
"""Where spans are that no worker did."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a request, in seconds since its arrival."""

    name: str
    place: str
    """The worker's id, or `ROUTER`."""
    start_s: float
    end_s: float | None
    """None: it goes on."""
    attributes: Attributes
    children: tuple[Span, ...] = ()
    error: str = ""
    """Why it failed; empty: it did not."""
    error_kind: str = ""

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Span]]:
        """This one and all below, each before those below it, with its depth."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def timeline(record: RequestRecord) -> Span:
    """What is known of a request by now."""
    since = record.arrived_at
    stages: list[Span] = []
    prepared_s = None if record.prepared_at is None else record.prepared_at - since
    ended_s = None if record.ended_at is None else record.ended_at - since
    tokenized = {"gen_ai.usage.input_tokens": record.prompt_tokens} if record.prompt_tokens else {}
    stages.append(Span("tokenize", ROUTER, 0.0, _first(prepared_s, ended_s), tokenized))
    if prepared_s is not None:
        placed_s = None if record.placed_at is None else record.placed_at - since
        stages.append(Span("queue", ROUTER, prepared_s, _first(placed_s, ended_s), {}))
        if placed_s is not None:
            stages += _attempts(record, placed_s, ended_s)
    return Span(
        name="request",
        place=ROUTER,
        start_s=0.0,
        end_s=ended_s,
        attributes=_of_request(record),
        children=tuple(stages),
        error=record.error,
        error_kind="" if record.error_kind is None else record.error_kind.value,
    )


def prompt_computed_s(entry: AttemptRecord) -> float | None:
    """How long the prompt of an attempt was computed, by whichever worker; None if unknown."""
    marks = entry.marks
    if marks is None:
        return None
    if marks.source is not None:
        return marks.source.computed_s - marks.source.scheduled_s
    begun_s = _first(marks.admitted_s, marks.ready_s)
    if begun_s is None:
        return None
    if marks.first_token_s is not None:
        return marks.first_token_s - begun_s
    # Told before the first token, and never again: its client left, or a stop string came.
    return None


def _of_request(record: RequestRecord) -> Attributes:
    told: dict[str, str | int | float | tuple[str, ...]] = {
        "gen_ai.request.max_tokens": record.max_tokens,
        "kvferry.request.id": record.request_id,
        "kvferry.request.service_class": record.service_class,
        "kvferry.request.outcome": record.outcome.value,
        "kvferry.request.attempts": len(record.attempts) + record.attempts_left_out,
        "kvferry.request.failed_attempts": record.failures,
    }
    if record.work_id is not None:
        told["kvferry.work.id"] = record.work_id
    if record.model:
        told["gen_ai.request.model"] = record.model
    if record.prompt_tokens:
        told["gen_ai.usage.input_tokens"] = record.prompt_tokens
    if record.outcome is not Outcome.REFUSED:
        told["gen_ai.usage.output_tokens"] = sum(each.tokens for each in record.attempts)
    if record.finish_reasons:
        told["gen_ai.response.finish_reasons"] = tuple(record.finish_reasons)
    if record.usage is not None:
        told["kvferry.usage.cached_tokens"] = record.usage.cached_tokens
    return told


def _attempts(record: RequestRecord, placed_s: float, ended_s: float | None) -> Iterator[Span]:
    """Each, and before it how long the choice of its workers took, or the wait for some."""
    free_s: float | None = placed_s
    for entry in record.attempts:
        span = _attempt(entry, record.arrived_at)
        if free_s is not None:
            yield Span("route", ROUTER, free_s, span.start_s, {})
        yield span
        free_s = span.end_s
    if free_s is not None and record.outcome in (Outcome.RUNNING, Outcome.FAILED):
        yield Span("route", ROUTER, free_s, ended_s, {})


def _attempt(entry: AttemptRecord, since: float) -> Span:
    start_s = entry.started_at - since
    end_s = None if entry.ended_at is None else entry.ended_at - since
    marks = entry.marks
    phases = () if marks is None else _Phases(entry, marks, start_s, end_s).spans()
    told: dict[str, str | int | float] = {
        "kvferry.attempt.number": entry.number,
        "kvferry.attempt.tokens": entry.tokens,
        "kvferry.decode.worker": entry.decode_worker,
    }
    if entry.prefill_worker is not None:
        told["kvferry.prefill.worker"] = entry.prefill_worker
    if entry.first_token_at is not None:
        told["kvferry.attempt.first_token_s"] = round(entry.first_token_at - entry.started_at, 6)
    if entry.usage is not None:
        told |= {
            "kvferry.hit_tokens.prefill": entry.usage.prefill_hit_tokens,
            "kvferry.hit_tokens.host": entry.usage.host_hit_tokens,
            "kvferry.hit_tokens.decode": entry.usage.decode_hit_tokens,
            "kvferry.handoff.tokens": entry.usage.moved_tokens,
            "kvferry.handoff.bytes": entry.usage.moved_bytes,
        }
    return Span(
        name=f"attempt {entry.number}",
        place=ROUTER,
        start_s=start_s,
        end_s=end_s,
        attributes=told,
        children=phases,
        error=entry.error,
        error_kind="" if entry.error_kind is None else entry.error_kind.value,
    )


class _Phases:
    """What a worker told of one attempt, on the router's scale."""

    def __init__(
        self, entry: AttemptRecord, marks: AttemptMarks, start_s: float, end_s: float | None
    ) -> None:
        self._entry = entry
        self._marks = marks
        self._base_s = start_s + _on_the_way_s(entry, marks)
        self._end_s = self._at(marks.ended_s) if marks.ended_s is not None else end_s

    def spans(self) -> tuple[Span, ...]:
        marks, place = self._marks, self._entry.decode_worker
        began_s = _first(marks.fetched_s, marks.admitted_s)
        spans = [self._span("wait", place, 0.0, began_s)]
        decoding_from_s = marks.adopted_s
        if marks.fetched_s is not None:
            spans.append(self._handoff(marks.fetched_s))
        if marks.admitted_s is not None:
            spans.append(self._span("prefill", place, marks.admitted_s, marks.first_token_s))
            decoding_from_s = marks.first_token_s
        if decoding_from_s is not None:
            spans.append(self._span("decode", place, decoding_from_s, None))
        return tuple(spans)

    def _handoff(self, fetched_s: float) -> Span:
        marks, place = self._marks, self._entry.decode_worker
        # Declined for lack of room if the prompt was computed here after all.
        end_s = _first(marks.adopted_s, marks.admitted_s)
        inside: list[Span] = []
        if marks.source is not None:
            inside += self._source(fetched_s)
        elif marks.ready_s is not None:
            inside.append(self._span("prefill.queue", self._source_id, fetched_s, marks.ready_s))
            inside.append(
                self._span("prefill", self._source_id, marks.ready_s, marks.first_token_s)
            )
        if marks.granted_s is not None:
            inside.append(self._span("transfer", place, marks.granted_s, end_s))
        return self._span("handoff", place, fetched_s, end_s, tuple(inside))

    def _source(self, fetched_s: float) -> list[Span]:
        marks, source = self._marks, self._marks.source
        assert source is not None, "asked for where there is one"
        # By when its offer came, as `_on_the_way_s` does it.
        ready_s = source.scheduled_s + fetched_s if marks.ready_s is None else marks.ready_s
        asked_s = fetched_s + 0.5 * max(0.0, ready_s - fetched_s - source.scheduled_s)
        begun_s = asked_s + source.scheduled_s
        return [
            self._span("prefill.queue", self._source_id, asked_s, begun_s),
            self._span("prefill", self._source_id, begun_s, asked_s + source.computed_s),
        ]

    @property
    def _source_id(self) -> str:
        return self._entry.prefill_worker or ROUTER

    def _span(
        self,
        name: str,
        place: str,
        start_s: float,
        end_s: float | None,
        children: tuple[Span, ...] = (),
    ) -> Span:
        """What has no end of its own lasts as long as the attempt."""
        until_s = self._end_s if end_s is None else self._at(end_s)
        return Span(name, place, self._at(start_s), until_s, {}, children)

    def _at(self, worker_s: float) -> float:
        return self._base_s + worker_s


def _on_the_way_s(entry: AttemptRecord, marks: AttemptMarks) -> float:
    """From the router to the worker: half of what a way there and back took beyond the worker's
    own time, of the shortest one that is known."""
    ways = [
        at - entry.started_at - worker_s
        for at, worker_s in (
            (entry.first_token_at, marks.first_token_s),
            (entry.ended_at, marks.ended_s),
        )
        if at is not None and worker_s is not None
    ]
    return 0.5 * max(0.0, min(ways, default=0.0))


def _first(*times_s: float | None) -> float | None:
    """The first that is known."""
    return next((time_s for time_s in times_s if time_s is not None), None)
