"""What may end a request from outside: its client, its deadline, the router's shutdown.

One mechanism serves all three: the first error wins, and the read that waits for the worker
raises it. So no request costs a task or a timer per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.errors import KvferryError
    from router.worker_client import AttemptStream


class RequestControl:
    """The handle of one request in flight."""

    def __init__(self, deadline: float, tenant: str = "") -> None:
        """`deadline` is of the router's clock, in seconds; `tenant` may end the request."""
        self.deadline = deadline
        self.tenant = tenant
        self.ended_samples: set[int] = set()
        """Samples whose text has met a stop string."""
        self._error: KvferryError | None = None
        self._stream: AttemptStream | None = None

    def end(self, error: KvferryError) -> None:
        """End the request with `error`; only the first call counts."""
        if self._error is None:
            self._error = error
            if self._stream is not None:
                self._stream.abort(error)

    def raise_if_ended(self) -> None:
        """Raise the error the request was ended with."""
        if self._error is not None:
            raise self._error

    def end_sample(self, sample: int) -> None:
        """One sample needs no more tokens; the request goes on with the others."""
        assert self._stream is not None, "a sample ends in some attempt"
        self.ended_samples.add(sample)
        self._stream.end_sample(sample)

    def attach(self, stream: AttemptStream) -> None:
        """`stream` is what `end` aborts from now on, in place of any before."""
        self._stream = stream
        if self._error is not None:
            stream.abort(self._error)
