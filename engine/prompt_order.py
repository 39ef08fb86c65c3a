"""Whose prompt is next: in order of arrival, but for those that go first.

A router says so (`Request.goes_first`) of a tenant that asks for little while another one asks for
everything. Steps cannot be interrupted, prompts can: such a prompt waits for the end of a step, and
not for that of a long prompt.

**Nobody starves.** A step *passes over* a prompt that gets nothing of it while a later one, which
went first, does. Who was passed over `PASSED_OVER_MAX` times goes first as well, and is older than
all that might still come before it. Where somebody who was retracted waits, or the oldest was
refused for lack of room, nobody overtakes: what `engine.admission` proves needs that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.request import Request

PASSED_OVER_MAX = 64
"""Of the default size, some 8,000 tokens that go first."""


class Ordered(Protocol):
    """What is looked at of a request."""

    goes_first: bool
    arrival: int
    passed_over: int


def turn(request: Ordered) -> tuple[bool, int]:
    """By which prompts are ordered."""
    goes_first = request.goes_first or request.passed_over >= PASSED_OVER_MAX
    return not goes_first, request.arrival


def next_to_admit(waiting: Sequence[Request]) -> Request:
    """Who is next of those that hold nothing: one at least, in order of arrival."""
    if any(request.retractions for request in waiting):
        return waiting[0]
    return min(waiting, key=turn)


def before(request: Request, prompts: Iterable[Request]) -> int:
    """Tokens to be computed before those of `request`, of `prompts` that hold KV."""
    is_later, _ = turn(request)
    return sum(other.uncomputed for other in prompts if is_later or not turn(other)[0])


def count_passed_over(prompts: Iterable[Ordered], computed: Iterable[Ordered]) -> None:
    """A step computes something of `computed`: count it at those of `prompts` that had to wait."""
    chosen = list(computed)
    latest = max((request.arrival for request in chosen if request.goes_first), default=0)
    if latest:
        for request in prompts:
            if request.arrival < latest and request not in chosen:
                request.passed_over += 1
