"""The attempts of one request: choose workers, call the decode worker, go on elsewhere.

One leg: the router calls the decode worker alone, which fetches the prompt's KV from the prefill
worker named in the call. An attempt that fails is followed by another one, elsewhere if there is an
elsewhere. What the client has by then goes along (`AttemptRequest.resumed`), and the answer goes on
after it as if nothing had happened. There is never more than one attempt at a time.

Followed are failures of a worker: it is gone, cut off, full, or could not get the prompt's KV.
Input that a worker refuses, a fault of ours, the client's own deadline and what ended the request
from outside are its end.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.cache_key import Sharing
from kvferry.errors import KvferryError, Overloaded, RequestCancelled, WorkerUnavailable
from kvferry.generation import AttemptRequest, PrefillSource
from kvferry.ids import Attempt, AttemptId, new_request_id
from kvferry.limits import RESUME_PATIENCE_S
from router.answer_progress import AnswerProgress
from router.policy import Demand
from router.prompt_keys import prompt_keys

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

    from numpy.typing import NDArray

    from kvferry.clock import Clock
    from kvferry.generation import AttemptOutput, SampleProgress
    from kvferry.ids import TokenIds
    from router.fleet import Fleet
    from router.policy import Route
    from router.request import ValidRequest
    from router.request_control import RequestControl
    from router.request_log import RequestRecord
    from router.route_chooser import RouteChooser

_log = logging.getLogger(__name__)

_REFUSED_PAUSE_S = 0.2
"""Until a worker that refused an answer that has begun is asked again."""


class RoutedOutput(NamedTuple):
    """An output of a worker, and which attempt it belongs to."""

    output: AttemptOutput
    route: Route
    attempt: Attempt


class AttemptRunner:
    """Runs requests on the workers of a fleet."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        chooser: RouteChooser,
        block_tokens: int,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._fleet = fleet
        self._chooser = chooser
        self._block_tokens = block_tokens
        self._clock = clock
        self._rng = rng

    async def run(
        self, request: ValidRequest, control: RequestControl, record: RequestRecord
    ) -> AsyncGenerator[RoutedOutput, None]:
        """Outputs in order; the last one of each sample has `finish`. Closing the generator ends
        the attempt. Every attempt is noted in `record`.

        Raises `KvferryError`: what the request was ended with from outside, or why the last
        attempt failed.
        """
        # Clients choose and reuse their ids; what workers and handoffs are told apart by is ours.
        work_id = record.work_id = new_request_id()
        progress = AnswerProgress(request, control)
        for number in itertools.count(1):
            route = await self._next_route(request, control, progress)
            attempt = AttemptId(work_id, Attempt(number))
            work = _attempt_request(request, attempt, route, progress.resumed, control.goes_first)
            samples_left = work.samples_left
            try:
                with (
                    record.attempt(attempt.attempt, route, self._clock) as seen,
                    self._attempting(work, route, control, progress) as read,
                ):
                    while samples_left:
                        output = await read()
                        seen.took(output, self._clock)
                        progress.took(output)
                        yield RoutedOutput(output, route, attempt.attempt)
                        samples_left -= output.finish is not None
                return
            except KvferryError as error:
                control.raise_if_ended()
                _log_failure(error, request, attempt, route, progress)
                progress.failed(error, route, self._clock.now())
            await self._fleet.recheck(route.workers)

    async def _next_route(
        self, request: ValidRequest, control: RequestControl, progress: AnswerProgress
    ) -> Route:
        """Where the next attempt goes. Raises what the client is told if there is no such place.

        One whose worker was lost waits for another one; one that was refused only if it has begun,
        because its client cannot ask anybody else for the rest.
        """
        known = progress.known
        hashes = self._hashes_of(request, known)
        demand = Demand(int(known.size), progress.answer_tokens_left)
        while True:
            control.raise_if_ended()
            try:
                return self._route(hashes, demand, progress, control.goes_first)
            except KvferryError as error:
                since = progress.stalled_since
                if since is None or isinstance(error, Overloaded):
                    raise
                left_s = since + RESUME_PATIENCE_S - self._clock.now()
                if left_s <= 0.0:
                    raise
            rest = self._fleet.workers_changed.listen()
            control.pause(rest)
            await rest.wait(min(left_s, _REFUSED_PAUSE_S) if progress.full else left_s)
            progress.full = frozenset()

    def _hashes_of(self, request: ValidRequest, known: TokenIds) -> NDArray[np.uint64]:
        """By which a worker is preferred that holds them; none where nothing held is used."""
        use = request.cache_use
        if use.sharing is not Sharing.SHARED:
            return np.empty(0, dtype=np.uint64)
        return prompt_keys(known, self._block_tokens, use.extra_key)

    def _route(
        self,
        hashes: NDArray[np.uint64],
        demand: Demand,
        progress: AnswerProgress,
        goes_first: bool,
    ) -> Route:
        view = self._fleet.view(hashes, goes_first=goes_first)
        try:
            route = self._chooser.choose(view, demand, hashes, progress.avoid, self._rng)
        except WorkerUnavailable as error:
            if progress.failure is None:
                raise
            raise WorkerUnavailable(f"{progress.failure}; now {error}") from error
        if progress.failure is not None and route.decode.worker_id in progress.full:
            raise progress.failure
        return route

    @contextlib.contextmanager
    def _attempting(
        self, work: AttemptRequest, route: Route, control: RequestControl, progress: AnswerProgress
    ) -> Iterator[Callable[[], Awaitable[AttemptOutput]]]:
        """How to read the outputs of one attempt, which is counted at its workers while inside."""
        ticket = self._fleet.dispatch(
            route, progress.kv_tokens, work.samples_left, goes_first=work.goes_first
        )
        with contextlib.ExitStack() as ending:
            ending.callback(self._fleet.end, ticket)
            client = self._fleet.client(route.decode.worker_id)
            remaining_s = max(0.0, control.deadline - self._clock.now())
            stream = client.generate(work, remaining_s)
            needless = RequestCancelled("the router needs no more of this attempt")
            ending.callback(stream.abort, needless)
            control.attach(stream)

            async def read() -> AttemptOutput:
                output = await stream.read()
                if output is None:
                    worker_id = route.decode.worker_id
                    raise WorkerUnavailable(f"worker {worker_id} ended without a finish")
                if output.tokens:
                    self._fleet.prefilled(ticket)
                return output

            yield read


def _log_failure(
    error: KvferryError,
    request: ValidRequest,
    attempt: AttemptId,
    route: Route,
    progress: AnswerProgress,
) -> None:
    _log.warning(
        "attempt failed",
        extra={
            "request_id": request.request_id,
            "attempt": str(attempt),
            "decode_worker": route.decode.worker_id,
            "prefill_worker": None if route.prefill is None else route.prefill.worker_id,
            "tokens_sent": progress.tokens_sent,
            "reason": str(error),
        },
    )


def _attempt_request(
    request: ValidRequest,
    attempt: AttemptId,
    route: Route,
    resumed: tuple[SampleProgress, ...],
    goes_first: bool,
) -> AttemptRequest:
    source = None
    if route.prefill is not None:
        source = PrefillSource(
            worker_id=route.prefill.worker_id,
            address=route.prefill.address,
            incarnation=route.prefill.incarnation,
        )
    return AttemptRequest(
        id=attempt,
        prompt=request.prompt,
        sampling=request.sampling,
        cache_use=request.cache_use,
        source=source,
        resumed=resumed,
        goes_first=goes_first,
    )
