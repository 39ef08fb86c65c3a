"""The router's memory of requests: bounded, and right whatever a request ends with."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvferry.attempt_marks import AttemptMarks
from kvferry.clock import ManualClock
from kvferry.errors import KvferryError, Overloaded, WorkerUnavailable
from kvferry.generation import AttemptOutput, AttemptUsage, OutputToken
from kvferry.ids import Attempt, Incarnation, RequestId, WorkerId
from kvferry.limits import ATTEMPTS_REMEMBERED_MAX
from kvferry.membership import Role, WorkerInfo
from kvferry.sampling import SamplingParams
from kvferry.tracing_config import TracingConfig
from router.policy import Route
from router.request import ClientRequest
from router.request_log import Outcome, RequestLog
from tests.support.request_records import TRACE

if TYPE_CHECKING:
    from kvferry.trace_context import TraceContext

ROUTE = Route(WorkerInfo(WorkerId("d"), Role.DECODE, Incarnation(1), "x:1"), None, 3, 1.0)


def asked(trace: TraceContext | None = None) -> ClientRequest:
    return ClientRequest("", "", None, SamplingParams(), trace=trace)


class Scene:
    def __init__(self, kept: int = 3) -> None:
        self.clock = ManualClock(5.0)
        self.log = RequestLog(self.clock, TracingConfig(requests_kept=kept))
        self.ended = []
        self.log.on_end.append(self.ended.append)

    def run(self, name: str, error: BaseException | None = None, *, attempts: int = 1) -> None:
        """A request that ends so after some attempts."""
        try:
            with self.log.following(RequestId(name), asked(), self.clock.now()) as record:
                for number in range(attempts):
                    with record.attempt(Attempt(number + 1), ROUTE, self.clock):
                        self.clock.advance(1.0)
                        if error is not None and number + 1 == attempts:
                            raise error
                if error is not None:
                    raise error
        except (KvferryError, asyncio.CancelledError, GeneratorExit, ZeroDivisionError):
            pass


@pytest.mark.parametrize(
    ("error", "attempts", "outcome"),
    [
        (None, 1, Outcome.SUCCEEDED),
        (WorkerUnavailable("gone"), 2, Outcome.FAILED),
        (Overloaded("full", 1.0), 0, Outcome.REFUSED),
        (Overloaded("full", 1.0), 1, Outcome.FAILED),
        (asyncio.CancelledError(), 1, Outcome.CLIENT_GONE),
        (GeneratorExit(), 1, Outcome.CLIENT_GONE),
        (ZeroDivisionError(), 1, Outcome.FAILED),
    ],
)
def test_each_end_has_its_outcome(error, attempts, outcome):
    scene = Scene()
    scene.run("r", error, attempts=attempts)
    (record,) = scene.ended
    assert record.outcome is outcome
    assert record.ended_at == 5.0 + attempts
    assert scene.log.find("r") is record
    assert scene.log.running() == ()
    assert len(record.attempts) == attempts
    if isinstance(error, KvferryError):
        assert (record.error, record.error_kind) == (str(error), error.kind)


def test_only_so_many_are_kept_and_refused_ones_push_none_out():
    scene = Scene(kept=3)
    for number in range(5):
        scene.run(f"good-{number}")
    for number in range(50):
        scene.clock.advance(1.0)
        scene.run(f"refused-{number}", Overloaded("full", 1.0), attempts=0)
    names = [record.request_id for record in scene.log.recent(100)]
    assert names == [
        *("refused-49", "refused-48", "refused-47"),
        *("good-4", "good-3", "good-2"),
    ]
    assert [record.request_id for record in scene.log.recent(1)] == ["refused-49"]
    assert scene.log.find("good-1") is None


def test_nothing_is_kept_where_nothing_is_to_be():
    scene = Scene(kept=0)
    scene.run("r")
    assert scene.log.recent(10) == []
    assert len(scene.ended) == 1, "who listens hears of it all the same"


def test_a_request_in_flight_is_found_before_an_older_one_of_its_id():
    scene = Scene()
    scene.run("r")
    with scene.log.following(RequestId("r"), asked(), 9.0) as record:
        assert scene.log.find("r") is record
        assert scene.log.find(record.trace.trace_id) is record
        assert scene.log.running() == (record,)
    assert scene.log.find("r") is record


def test_the_first_and_the_last_of_many_attempts_are_remembered():
    scene = Scene()
    scene.run("r", attempts=40)
    (record,) = scene.ended
    numbers = [entry.number for entry in record.attempts]
    assert len(numbers) == ATTEMPTS_REMEMBERED_MAX
    assert record.attempts_left_out == 40 - ATTEMPTS_REMEMBERED_MAX
    assert numbers[:8] == list(range(1, 9))
    assert numbers[-1] == 40


def test_a_trace_goes_on_or_begins():
    scene = Scene()
    with scene.log.following(RequestId("a"), asked(TRACE), 5.0) as record:
        assert record.parent is TRACE
        assert record.trace.trace_id == TRACE.trace_id
        assert record.trace.span_id != TRACE.span_id
    with scene.log.following(RequestId("b"), asked(), 5.0) as record:
        assert record.parent is None
        assert record.trace.trace_id != TRACE.trace_id


def test_what_an_attempt_brings():
    scene = Scene()
    usage, marks = AttemptUsage(moved_tokens=3), AttemptMarks(fetched_s=0.5)
    with (
        scene.log.following(RequestId("r"), asked(), 5.0) as record,
        record.attempt(Attempt(1), ROUTE, scene.clock) as entry,
    ):
        entry.took(AttemptOutput((), usage=usage, marks=marks), scene.clock)
        scene.clock.advance(1.0)
        entry.took(AttemptOutput((OutputToken(4),)), scene.clock)
        scene.clock.advance(1.0)
        entry.took(AttemptOutput((OutputToken(4), OutputToken(5))), scene.clock)
    assert (entry.tokens, entry.first_token_at, entry.ended_at) == (3, 6.0, 7.0)
    assert (entry.usage, entry.marks) == (usage, marks)
    assert record.first_token_at == 6.0
