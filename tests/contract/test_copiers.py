"""What a tier relies on, of the copier with a thread and of the one that tests drive."""

from __future__ import annotations

import pytest

from mem_cache.copier import Copy, ThreadCopier
from tests.support.manual_copier import ManualCopier
from tests.support.waiting import wait_until


class Bench:
    """A copier, and what its copies did."""

    def __init__(self, copier):
        self.copier = copier
        self.ran: list[str] = []

    def submit(self, name, error=None):
        def work(copy):
            self.ran.append(name)
            if error is not None:
                raise error

        copy = Copy(False, work)
        self.copier.submit(copy)
        return copy

    def ends(self, count):
        """The next `count` ends."""
        found = []

        def collect():
            if isinstance(self.copier, ManualCopier):
                self.copier.run_all()
            found.extend(self.copier.take_done())
            return len(found) >= count

        wait_until(f"{count} ends", collect)
        return found


@pytest.fixture(params=[ThreadCopier, ManualCopier])
def bench(request):
    bench = Bench(request.param())
    yield bench
    bench.copier.close()


def test_each_copy_runs_and_is_reported_once_in_order(bench):
    copies = [bench.submit(name) for name in "abc"]
    assert [end.copy for end in bench.ends(3)] == copies
    assert bench.ran == ["a", "b", "c"]
    assert bench.copier.take_done() == []


def test_a_failure_is_reported_with_its_reason(bench):
    error = OSError("broken")
    bench.submit("a", error)
    assert [end.error for end in bench.ends(1)] == [error]


def test_what_was_finished_has_run_once_and_is_not_reported(bench):
    copy = bench.submit("a")
    assert bench.copier.finish(copy) is None
    assert bench.ran == ["a"]
    bench.submit("b")
    assert len(bench.ends(1)) == 1
    assert bench.ran == ["a", "b"]


def test_finishing_what_is_done_already_takes_its_end(bench):
    error = OSError("broken")
    first, second = bench.submit("a", error), bench.submit("b")
    if isinstance(bench.copier, ManualCopier):
        bench.copier.run_all()
    wait_until("both ran", lambda: bench.ran == ["a", "b"])
    assert bench.copier.finish(first) is error
    assert [end.copy for end in bench.ends(1)] == [second]


def test_after_a_cancellation_nothing_runs_and_nothing_is_reported(bench):
    copy = bench.submit("a")
    bench.copier.cancel(copy)
    ran = list(bench.ran)
    bench.submit("b")
    assert len(bench.ends(1)) == 1
    assert bench.ran == [*ran, "b"]
    assert copy.is_cancelled


def test_a_wake_up_finds_something_to_take(bench):
    found = []
    bench.copier.on_done = lambda: found.extend(bench.copier.take_done())
    bench.submit("a")
    if isinstance(bench.copier, ManualCopier):
        bench.copier.run_all()
    wait_until("the wake-up", lambda: len(found) == 1)
