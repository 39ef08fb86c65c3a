"""What the console remembers: the load of the last minutes, and who came and went. Bounded.

A sample looks at every worker's last status and every request in flight; it asks nobody. It is
taken whether or not somebody looks, because one mostly comes to look after something happened; but
what nobody sees costs no more than a thousandth of a core.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.limits import (
    CONSOLE_DEPARTED_S,
    CONSOLE_EVENTS_KEPT,
    CONSOLE_LATENCIES_KEPT,
    CONSOLE_SAMPLES_KEPT,
)
from router.api.console.request_answers import first_token_at
from router.api.console.snapshot import roles_out
from router.request_log import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from aiohttp import web

    from kvferry.clock import Clock
    from router.api.console.shapes import EventOut, GoneOut, HistoryOut
    from router.fleet import WorkerSummary
    from router.request_log import RequestRecord
    from router.router import Router

_log = logging.getLogger(__name__)

INTERVAL_S = 1.0
UNSEEN_INTERVAL_S = 10.0
"""While nobody looks, where samples of each second would cost more than `_SHARE`."""
_SHARE = 0.001
"""Of a core. A sample of four workers takes 0.1 to 0.9 ms, one of 256 of them 3 to 5."""
_SEEN_S = 15.0
"""Who asked so long ago looks no more: a page asks every second."""
LATENCY_WINDOW_S = 15.0
"""Of the requests that ended lately: fewer would make no percentile, more would hide a change."""

FIELDS = (
    "at_s",
    "in_flight",
    "waiting",
    "prompt_tokens_per_s",
    "generated_tokens_per_s",
    "succeeded",
    "failed",
    "refused",
    "ttft_p50_s",
    "ttft_p95_s",
    "itl_p50_s",
    "itl_p95_s",
    "kv_prefill",
    "kv_decode",
    "kv_both",
)
"""Of a sample, in this order. What ended is per second; None: nothing is known."""


@dataclass(frozen=True, slots=True)
class _Latency:
    ended_at: float
    ttft_s: float | None
    itl_s: float | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a change of is told."""

    role: str
    incarnation: int
    is_reachable: bool
    is_draining: bool


@dataclass(slots=True)
class _Totals:
    """Since the start."""

    succeeded: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class ClusterRecorder:
    """Samples one router every `INTERVAL_S`, less often while nobody looks and it costs much."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._points: deque[tuple[float | int | None, ...]] = deque(maxlen=CONSOLE_SAMPLES_KEPT)
        self._sampled = 0
        self._seen_at = clock.now()
        """When somebody looked; at first, whoever has started the cluster."""
        self._ended = _Totals()
        self._before = _Totals()
        self._before_at: float | None = None
        self._latencies: deque[_Latency] = deque(maxlen=CONSOLE_LATENCIES_KEPT)
        self._workers: dict[str, _Seen] = {}
        self._events: deque[EventOut] = deque(maxlen=CONSOLE_EVENTS_KEPT)
        self._events_made = 0
        self._gone: dict[str, GoneOut] = {}

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """A context of the server: samples are taken meanwhile."""
        self._router.log.on_end.append(self.note_end)
        task = asyncio.create_task(self._run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self._router.log.on_end.remove(self.note_end)

    def history(self, since: int) -> HistoryOut:
        """The samples after the one of number `since`; -1: all that are kept."""
        self._seen_at = self._clock.now()
        oldest = self._sampled - len(self._points)
        first = min(max(since + 1, oldest), self._sampled)
        # A router that was started anew has other numbers.
        first = oldest if since >= self._sampled else first
        return {
            "first": first,
            "interval_s": INTERVAL_S,
            "fields": list(FIELDS),
            "points": [list(point) for point in list(self._points)[first - oldest :]],
        }

    def events(self) -> list[EventOut]:
        """Who came and went, latest last."""
        return list(self._events)

    def gone(self) -> list[GoneOut]:
        """Who left less than `CONSOLE_DEPARTED_S` ago."""
        return list(self._gone.values())

    def note_end(self, record: RequestRecord) -> None:
        """A request has ended."""
        ended = self._ended
        match record.outcome:
            case Outcome.REFUSED:
                ended.refused += 1
            case Outcome.FAILED:
                ended.failed += 1
            case _:
                ended.succeeded += 1
        _count_tokens(ended, (record,))
        first, itl_s = first_token_at(record), None
        if record.usage is not None and record.usage.itl_ms > 0:
            itl_s = record.usage.itl_ms / 1000
        if first is not None and record.ended_at is not None:
            entry = _Latency(record.ended_at, first - record.arrived_at, itl_s)
            self._latencies.append(entry)

    def sample(self) -> None:
        """Take one."""
        now = self._clock.now()
        summaries = self._router.worker_summaries()
        self._note_workers(summaries, now)
        totals = _Totals(**{name: getattr(self._ended, name) for name in _Totals.__slots__})
        _count_tokens(totals, self._router.log.running())
        if self._before_at is not None and now > self._before_at:
            self._points.append(self._point(summaries, totals, now, now - self._before_at))
            self._sampled += 1
        self._before, self._before_at = totals, now

    async def _run(self) -> None:
        while True:
            began = self._clock.now()
            try:
                self.sample()
            except Exception:  # noqa: BLE001 - outermost frame; nothing but the console loses by it
                _log.exception("no sample for the console")
            await asyncio.sleep(self.pause_s(self._clock.now() - began))

    def pause_s(self, cost_s: float) -> float:
        """Until the next sample after one that took so long."""
        now = self._clock.now()
        if now - self._seen_at < _SEEN_S:
            return INTERVAL_S
        return min(max(INTERVAL_S, cost_s / _SHARE), UNSEEN_INTERVAL_S)

    def _point(
        self, summaries: list[WorkerSummary], totals: _Totals, now: float, passed_s: float
    ) -> tuple[float | int | None, ...]:
        before, admission = self._before, self._router.admission_snapshot()
        recent = [each for each in self._latencies if each.ended_at >= now - LATENCY_WINDOW_S]
        ttft = sorted(each.ttft_s for each in recent if each.ttft_s is not None)
        itl = sorted(each.itl_s for each in recent if each.itl_s is not None)
        roles = roles_out(summaries)
        held = {
            role: round(each["slots_held"] / each["slots_total"], 4)
            for role, each in roles.items()
            if each["slots_total"]
        }
        # A request that lost an attempt from its record takes the attempt's tokens with it.
        generated = max(0, totals.generated_tokens - before.generated_tokens)
        return (
            round(now, 3),
            self._router.requests_in_flight,
            sum(seen.waiting for seen in admission.classes.values()),
            round(max(0, totals.prompt_tokens - before.prompt_tokens) / passed_s, 1),
            round(generated / passed_s, 1),
            *(
                round((now_ended - ended) / max(passed_s, INTERVAL_S), 1)
                for now_ended, ended in (
                    (totals.succeeded, before.succeeded),
                    (totals.failed, before.failed),
                    (totals.refused, before.refused),
                )
            ),
            *(percentile(ttft, 0.5), percentile(ttft, 0.95)),
            *(percentile(itl, 0.5), percentile(itl, 0.95)),
            *(held.get(role) for role in ("prefill", "decode", "both")),
        )

    # --- who came and went ---

    def _note_workers(self, summaries: list[WorkerSummary], now: float) -> None:
        workers = {str(each.info.worker_id): _seen(each) for each in summaries}
        for name, seen in workers.items():
            self._gone.pop(name, None)
            for kind, text in _changes(self._workers.get(name), seen):
                self._tell(name, kind, text, now)
        for name in self._workers.keys() - workers.keys():
            self._tell(name, "trouble", "left the cluster", now)
            gone: GoneOut = {"id": name, "role": self._workers[name].role, "left_at_s": now}
            self._gone[name] = gone
        self._workers = workers
        for name in [name for name, gone in self._gone.items() if _is_forgotten(gone, now)]:
            del self._gone[name]

    def _tell(self, worker: str, kind: str, text: str, now: float) -> None:
        event: EventOut = {
            "number": self._events_made,
            "at_s": now,
            "worker": worker,
            "kind": kind,
            "text": text,
        }
        self._events.append(event)
        self._events_made += 1


def percentile(ascending: list[float], share: float) -> float | None:
    """The nearest value that so many are not above; None of none."""
    if not ascending:
        return None
    return round(ascending[min(len(ascending) - 1, int(share * len(ascending)))], 6)


def _count_tokens(totals: _Totals, records: Iterable[RequestRecord]) -> None:
    for record in records:
        totals.generated_tokens += sum(attempt.tokens for attempt in record.attempts)
        if first_token_at(record) is not None:
            totals.prompt_tokens += record.prompt_tokens


def _seen(summary: WorkerSummary) -> _Seen:
    info = summary.info
    is_reachable = summary.is_reachable or summary.status is None
    return _Seen(info.role.value, info.incarnation, is_reachable, info.is_draining)


def _changes(before: _Seen | None, now: _Seen) -> list[tuple[str, str]]:
    """Kind and text of each thing that is worth telling."""
    if before is None:
        return [("good", f"joined for {now.role}")]
    if before.incarnation != now.incarnation:
        return [("good", f"came back as a new process, for {now.role}")]
    changes: list[tuple[str, str]] = []
    if before.role != now.role:
        changes.append(("plain", f"is used for {now.role}, no longer for {before.role}"))
    if before.is_reachable != now.is_reachable:
        text = "answers again" if now.is_reachable else "does not answer"
        changes.append(("good" if now.is_reachable else "trouble", text))
    if now.is_draining and not before.is_draining:
        changes.append(("plain", "drains: it is given nothing new"))
    return changes


def _is_forgotten(gone: GoneOut, now: float) -> bool:
    return now - gone["left_at_s"] > CONSOLE_DEPARTED_S
