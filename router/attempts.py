"""The attempts of one request: choose workers, call the decode worker, try again.

One leg: the router calls the decode worker alone, which fetches the prompt's KV from the prefill
worker named in the call. An attempt that fails before its first token is tried again, elsewhere
if there is an elsewhere. After the first token the client's stream ends with the error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.cache_key import Sharing
from kvferry.errors import (
    DeadlineExceeded,
    KvferryError,
    Overloaded,
    RequestCancelled,
    WorkerUnavailable,
)
from kvferry.generation import AttemptRequest, PrefillSource
from kvferry.ids import Attempt, AttemptId, new_request_id
from kvferry.kv_events import prompt_block_hashes
from kvferry.limits import ATTEMPTS_MAX
from router.policy import Demand, choose_route

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator

    from kvferry.clock import Clock
    from kvferry.generation import AttemptOutput
    from kvferry.ids import WorkerId
    from kvferry.kv_events import BlockHash
    from router.fleet import Fleet
    from router.policy import CostModel, Route
    from router.request import ValidRequest
    from router.request_control import RequestControl

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoutedOutput:
    """An output of a worker, and which attempt it belongs to."""

    output: AttemptOutput
    route: Route
    attempt: Attempt


@dataclass(slots=True, eq=False)
class _Progress:
    """What the next attempt has to know of those before."""

    tokens_sent: int = 0
    """Tokens the client has; an attempt that goes on after them must begin there."""
    avoid: frozenset[WorkerId] = frozenset()
    full: frozenset[WorkerId] = frozenset()
    """Decode workers that refused because they are overloaded; not asked twice."""
    failure: KvferryError | None = None
    """Why the attempt before failed."""


class AttemptRunner:
    """Runs requests on the workers of a fleet."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        cost_model: CostModel,
        block_tokens: int,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._fleet = fleet
        self._cost_model = cost_model
        self._block_tokens = block_tokens
        self._clock = clock
        self._rng = rng

    async def run(
        self, request: ValidRequest, control: RequestControl
    ) -> AsyncGenerator[RoutedOutput, None]:
        """Outputs in order; the last one of each sample has `finish`. Closing the generator ends
        the attempt.

        Raises `KvferryError`: what the request was ended with from outside, or why the last
        attempt failed.
        """
        # Clients choose and reuse their ids; what workers and handoffs are told apart by is ours.
        work_id = new_request_id()
        hashes = self._hashes_of(request)
        demand = Demand(int(request.prompt.size), request.sampling.max_tokens)
        progress = _Progress()
        for number in range(1, ATTEMPTS_MAX + 1):
            control.raise_if_ended()
            route = self._route(hashes, demand, progress)
            attempt = AttemptId(work_id, Attempt(number))
            outputs = self._run_attempt(request, attempt, route, control)
            try:
                async for output in outputs:
                    progress.tokens_sent += len(output.tokens)
                    yield RoutedOutput(output, route, attempt.attempt)
                return
            except KvferryError as error:
                control.raise_if_ended()
                _log_failure(error, request, attempt, route, progress)
                _note_failure(error, attempt, route, progress)
            finally:
                await outputs.aclose()
            await self._fleet.recheck(route.workers)
        raise AssertionError("the last attempt returns or raises")

    def _hashes_of(self, request: ValidRequest) -> list[BlockHash]:
        """By which a worker is preferred that holds them; none where nothing held is used."""
        use = request.cache_use
        if use.sharing is not Sharing.SHARED:
            return []
        return prompt_block_hashes(request.prompt, self._block_tokens, use.extra_key)

    def _route(self, hashes: list[BlockHash], demand: Demand, progress: _Progress) -> Route:
        """Where the next attempt goes. Raises what the client is told if there is no such place."""
        view = self._fleet.view(hashes)
        try:
            route = choose_route(view, demand, self._cost_model, progress.avoid, self._rng)
        except WorkerUnavailable as error:
            if progress.failure is None:
                raise
            raise WorkerUnavailable(f"{progress.failure}; now {error}") from error
        if progress.failure is not None and route.decode.worker_id in progress.full:
            raise progress.failure
        return route

    async def _run_attempt(
        self, request: ValidRequest, attempt: AttemptId, route: Route, control: RequestControl
    ) -> AsyncGenerator[AttemptOutput, None]:
        """Outputs of one attempt, which is counted at its workers while this runs."""
        ticket = self._fleet.dispatch(route, int(request.prompt.size), request.sampling.n)
        client = self._fleet.client(route.decode.worker_id)
        remaining_s = max(0.0, control.deadline - self._clock.now())
        stream = client.generate(_attempt_request(request, attempt, route), remaining_s)
        control.attach(stream)
        samples_left = request.sampling.n
        try:
            while (output := await stream.read()) is not None:
                if output.tokens:
                    self._fleet.prefilled(ticket)
                yield output
                samples_left -= output.finish is not None
                if samples_left == 0:
                    return
            raise WorkerUnavailable(f"worker {route.decode.worker_id} ended without a finish")
        finally:
            stream.abort(RequestCancelled("the router needs no more of this attempt"))
            self._fleet.end(ticket)


def _note_failure(
    error: KvferryError, attempt: AttemptId, route: Route, progress: _Progress
) -> None:
    """Return if the request may be tried again, raise what the client is told otherwise."""
    if not error.status.retryable or isinstance(error, DeadlineExceeded):
        raise error
    if progress.tokens_sent:
        broken = f"the stream broke after {progress.tokens_sent} tokens: {error}"
        raise WorkerUnavailable(broken) from error
    if attempt.attempt == ATTEMPTS_MAX:
        raise error
    progress.failure = error
    progress.avoid |= route.workers
    if isinstance(error, Overloaded):
        progress.full |= {route.decode.worker_id}


def _log_failure(
    error: KvferryError,
    request: ValidRequest,
    attempt: AttemptId,
    route: Route,
    progress: _Progress,
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


def _attempt_request(request: ValidRequest, attempt: AttemptId, route: Route) -> AttemptRequest:
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
    )
