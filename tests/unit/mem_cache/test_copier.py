"""The copier's thread: order, ends, and that nothing runs when it must not."""

from __future__ import annotations

import threading

import pytest

from kvferry.errors import InternalError
from mem_cache.copier import Copy, ThreadCopier
from tests.support.waiting import wait_until


class Bench:
    """A copier whose copies note that they ran; one of them can be held up."""

    def __init__(self):
        self.copier = ThreadCopier()
        self.ran: list[str] = []
        self.held, self.began = threading.Event(), threading.Event()

    def copy(self, name, *, is_urgent=False, error=None):
        def work(copy):
            self.ran.append(name)
            if error is not None:
                raise error

        return Copy(is_urgent, work)

    def hold(self):
        """A copy that has begun and goes on until `held` is set."""

        def work(copy):
            self.began.set()
            assert self.held.wait(60)
            self.ran.append("held")

        copy = Copy(False, work)
        self.copier.submit(copy)
        assert self.began.wait(60)
        return copy

    def done(self, count):
        """The next `count` ends."""
        ends = []

        def collect():
            ends.extend(self.copier.take_done())
            return len(ends) >= count

        wait_until(f"{count} copies", collect)
        return ends


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.held.set()
    bench.copier.close()


def test_urgent_copies_first_and_otherwise_in_order(bench):
    held = bench.hold()
    copies = [bench.copy(name, is_urgent=name in "cd") for name in "abcd"]
    for copy in copies:
        bench.copier.submit(copy)
    bench.held.set()
    ends = bench.done(5)
    assert bench.ran == ["held", "c", "d", "a", "b"]
    assert [end.copy for end in ends] == [held, copies[2], copies[3], copies[0], copies[1]]
    assert all(end.error is None for end in ends)


def test_whoever_waits_is_woken_after_the_copy_can_be_collected(bench):
    seen = []
    bench.copier.on_done = lambda: seen.append(len(bench.copier.take_done()))
    bench.copier.submit(bench.copy("a"))
    wait_until("the wake-up", lambda: seen == [1])


def test_a_failure_ends_one_copy_with_its_reason(bench):
    error = RuntimeError("no memory")
    bench.copier.submit(bench.copy("a", error=error))
    bench.copier.submit(bench.copy("b"))
    ends = bench.done(2)
    assert [end.error for end in ends] == [error, None]


def test_finish_runs_here_what_has_not_begun(bench):
    bench.hold()
    copy = bench.copy("a")
    bench.copier.submit(copy)
    assert bench.copier.finish(copy) is None
    assert bench.ran == ["a"]
    failing = bench.copy("b", error=RuntimeError("no memory"))
    bench.copier.submit(failing)
    assert isinstance(bench.copier.finish(failing), RuntimeError)
    bench.held.set()
    assert len(bench.done(1)) == 1
    assert bench.copier.take_done() == [], "what was finished is not reported again"


def test_finish_waits_for_what_has_begun(bench):
    copy = bench.hold()
    threading.Timer(0.05, bench.held.set).start()
    assert bench.copier.finish(copy) is None
    assert bench.ran == ["held"]
    assert bench.copier.take_done() == []


def test_cancelled_copies_never_run_and_are_not_reported(bench):
    bench.hold()
    copy = bench.copy("a", is_urgent=True)
    bench.copier.submit(copy)
    bench.copier.cancel(copy)
    assert copy.is_cancelled
    bench.held.set()
    assert len(bench.done(1)) == 1
    assert bench.ran == ["held"]


def test_cancel_returns_when_a_copy_that_has_begun_touches_nothing_any_more(bench):
    began = threading.Event()

    def work(copy):
        began.set()
        wait_until("the cancellation", lambda: copy.is_cancelled)
        bench.ran.append("stopped")

    copy = Copy(True, work)
    bench.copier.submit(copy)
    assert began.wait(60)
    bench.copier.cancel(copy)
    assert bench.ran == ["stopped"]
    assert bench.copier.take_done() == []


def test_waiting_for_a_copy_that_hangs_ends_with_an_error(bench, monkeypatch):
    monkeypatch.setattr("mem_cache.copier.COPY_TIMEOUT_S", 0.01)
    copy = bench.hold()
    with pytest.raises(InternalError, match="still runs after"):
        bench.copier.finish(copy)
    with pytest.raises(InternalError, match="still runs after"):
        bench.copier.cancel(copy)


def test_closing_a_copier_that_hangs_ends_with_an_error(bench, monkeypatch):
    bench.hold()
    monkeypatch.setattr("mem_cache.copier.STOP_TIMEOUT_S", 0.01)
    with pytest.raises(InternalError, match="still runs after"):
        bench.copier.close()


def test_what_has_not_begun_when_it_closes_never_does(bench):
    bench.hold()
    bench.copier.submit(bench.copy("a"))
    threading.Timer(0.05, bench.held.set).start()
    bench.copier.close()
    assert bench.ran == ["held"]
