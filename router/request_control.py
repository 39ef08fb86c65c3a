"""What may end a request from outside: its client, its deadline, the router's shutdown.

One mechanism serves all three: the first error wins, and what the request waits for at that moment,
a place or a worker's next message, raises it. So no request costs a task or a timer per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.errors import KvferryError
    from router.worker_client import AttemptStream


class Waiting(Protocol):
    """What a request waits for."""

    def abort(self, error: KvferryError) -> None:
        """Have the wait raise `error`, if it is not over."""


class RequestControl:
    """The handle of one request in flight."""

    def __init__(self, deadline: float, tenant: str = "") -> None:
        """`deadline` is of the router's clock, in seconds; `tenant` may end the request."""
        self.deadline = deadline
        self.tenant = tenant
        self.goes_first = False
        """Whether workers compute its prompt before those of others; known with its places."""
        self.ended_samples: set[int] = set()
        """Samples whose text has met a stop string."""
        self._error: KvferryError | None = None
        self._stream: AttemptStream | None = None
        self._waiting: Waiting | None = None
        self._on_dispatch: Callable[[], None] | None = None

    def end(self, error: KvferryError) -> None:
        """End the request with `error`; only the first call counts."""
        if self._error is None:
            self._error = error
            if self._waiting is not None:
                self._waiting.abort(error)

    def raise_if_ended(self) -> None:
        """Raise the error the request was ended with."""
        if self._error is not None:
            raise self._error

    def end_sample(self, sample: int) -> None:
        """One sample needs no more tokens; the request goes on with the others."""
        assert self._stream is not None, "a sample ends in some attempt"
        self.ended_samples.add(sample)
        self._stream.end_sample(sample)

    def pause(self, rest: Waiting) -> None:
        """`rest`, between two attempts, is what `end` aborts from now on."""
        self._wait(rest)

    def wait_for(self, place: Waiting, on_dispatch: Callable[[], None]) -> None:
        """`place` is what `end` aborts from now on; `on_dispatch` is called per attempt."""
        self._on_dispatch = on_dispatch
        self._wait(place)

    def attach(self, stream: AttemptStream) -> None:
        """`stream`, of an attempt whose worker has been asked, is what `end` aborts from now on."""
        self._stream = stream
        if self._on_dispatch is not None:
            self._on_dispatch()
        self._wait(stream)

    def _wait(self, waiting: Waiting) -> None:
        self._waiting = waiting
        if self._error is not None:
            waiting.abort(self._error)
