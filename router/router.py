"""The router: takes clients' requests, has workers serve them, gives each client one stream."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from kvferry.adapter_files import adapter_identities
from kvferry.cache_key import Sharing
from kvferry.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    RequestCancelled,
    WorkerUnavailable,
)
from kvferry.ids import RequestId
from kvferry.kv_events import event_block_tokens
from kvferry.weights_identity import model_identity
from mem_cache.layout import kv_dtype
from router.admission_settings import AdmissionSettings
from router.attempts import AttemptRunner
from router.constraint_gate import ConstraintGate
from router.fleet import Fleet
from router.fleet_capacity import uncached_tokens
from router.grpc_worker_client import GrpcWorkerClient
from router.model_card import read_model_card
from router.policy import CostModel
from router.prompt_keys import prompt_keys
from router.request_control import RequestControl
from router.request_log import Outcome, RequestLog
from router.response_stream import ResponseStream
from router.route_chooser import RouteChooser
from router.served_models import ServedModels
from router.tokenizer import load_tokenizer
from router.validation import (
    cache_use_of,
    check_fields,
    check_request_id,
    encode_prompt,
    fit_to_context,
    prompt_characters,
)
from router.waiting_room import WaitingRoom
from router.work import work_of

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator, Callable, Iterator
    from pathlib import Path

    from kvferry.clock import Clock
    from kvferry.config import ClusterConfig
    from kvferry.ids import TokenIds
    from kvferry.membership import Membership, WorkerInfo
    from router.admission_snapshot import AdmissionSnapshot
    from router.fleet import WorkerSummary
    from router.fleet_capacity import FleetCapacity
    from router.model_card import ModelCard
    from router.request import ClientRequest, PromptInput, ResponseChunk, ValidRequest
    from router.waiting_room import Visit
    from router.worker_client import WorkerClient

_INLINE_ENCODE_CHARACTERS_MAX = 4096
"""A longer text is tokenized beside the event loop: this much takes about a millisecond, which
is also what a hop to another thread may cost on a busy machine."""

_SHUTTING_DOWN = "the router is shutting down"


class Router:
    """One router replica. Everything runs on one event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        model_directory: Path,
        clock: Clock,
        rng: random.Random,
        connect: Callable[[WorkerInfo], WorkerClient] = GrpcWorkerClient,
    ) -> None:
        """Reads the tokenizer; raises `ConfigError`. `rng` draws seeds and breaks ties."""
        self.config = config
        self.model_directory = model_directory
        dtype = kv_dtype(config.cache.dtype, config.model.dtype)
        self.card: ModelCard = read_model_card(model_directory, dtype, config.model.context_length)
        adapters = adapter_identities(config.model.adapters)
        self.models = ServedModels(config.model.served_name, adapters)
        self.tokenizer = load_tokenizer(model_directory)
        # Not the served name: KV in files may be older than what that names today.
        self._weights = model_identity(model_directory, config.model)
        self._block_tokens = event_block_tokens(config.cache.page_size)
        self.clock = clock
        self._rng = rng
        self._in_flight: dict[RequestId, RequestControl] = {}
        self._nothing_in_flight = asyncio.Event()
        self._nothing_in_flight.set()
        self._is_stopping = False
        cost_model = CostModel(
            kv_bytes_per_token=self.card.kv_bytes_per_token,
            running_max=config.scheduler.running_max,
            local_prefill_tokens_max=config.handoff.local_prefill_tokens_max,
        )
        chooser = RouteChooser(config.router.policy, cost_model, self._block_tokens, clock)
        self.fleet = Fleet(
            clock=clock,
            block_tokens=self._block_tokens,
            status_interval_s=config.router.status_interval_s,
            connect=connect,
            on_expected=chooser.expect,
        )
        self.log = RequestLog(clock, config.tracing)
        self._attempts = AttemptRunner(
            fleet=self.fleet,
            chooser=chooser,
            block_tokens=self._block_tokens,
            clock=clock,
            rng=rng,
        )

        settings = AdmissionSettings(
            classes=config.router.classes,
            tenants=config.router.tenants,
            requests_max=config.router.requests_max,
            step_tokens=config.scheduler.chunk_tokens,
        )
        self._waiting_room = WaitingRoom(settings, self._capacity, clock)
        vocab_size, ends = self.card.vocab_size, self.card.eos_token_ids
        self._constraints = ConstraintGate(
            model_directory, vocab_size, ends, settings.weights, clock
        )

    @property
    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        return self.fleet.is_ready and not self._is_stopping

    @property
    def requests_in_flight(self) -> int:
        """Requests accepted and not ended."""
        return len(self._in_flight)

    async def start(self) -> None:
        """Accept requests. Workers come with `set_membership`."""
        self._is_stopping = False

    async def wind_down(self, grace_s: float) -> None:
        """Refuse new requests from now on, give running ones `grace_s`, then end them.

        A client is told in either case, as long as the front doors are open: `WorkerUnavailable`.
        """
        self._is_stopping = True
        self.fleet.readiness_changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._nothing_in_flight.wait()
        for control in tuple(self._in_flight.values()):
            control.end(WorkerUnavailable(_SHUTTING_DOWN))

    async def stop(self) -> None:
        """End every request with `WorkerUnavailable` and forget the workers."""
        await self.wind_down(grace_s=0.0)
        await self.fleet.stop()
        self._waiting_room.close()
        await self._constraints.stop()
        self.fleet.readiness_changed.set()

    async def set_membership(self, membership: Membership) -> None:
        """Use these workers from now on; older versions are ignored."""
        await self.fleet.set_membership(membership)

    def draw_seed(self) -> int:
        """A seed for a request whose client set none."""
        return self._rng.getrandbits(63)

    def worker_summaries(self) -> list[WorkerSummary]:
        """Every worker as this router knows it."""
        return self.fleet.summaries()

    def admission_snapshot(self) -> AdmissionSnapshot:
        """Who waits and runs per class, and what was refused."""
        return self._waiting_room.snapshot()

    def cancel(self, request_id: str, tenant: str | None = None) -> bool:
        """End a request by its whole id; False if none of that id, of that tenant unless it is
        None, is in flight."""
        control = self._in_flight.get(RequestId(request_id))
        if control is None or tenant not in (None, control.tenant):
            return False
        control.end(RequestCancelled(f"request {request_id} was cancelled"))
        return True

    async def generate(self, request: ClientRequest) -> AsyncGenerator[ResponseChunk, None]:
        """The answer in pieces, the last one of each sample with `finish`.

        Closing the generator ends the request at its worker. Raises `KvferryError`.
        """
        arrived_at = self.clock.now()
        request_id = check_request_id(request.request_id)
        check_fields(request, self.models, self.card)
        with (
            self._in_flight_until(request_id, request, arrived_at) as control,
            self.log.following(request_id, request, arrived_at) as record,
            self._waiting_room.entered(request.service_class, request.tenant) as visit,
        ):
            assert request.input is not None, "checked above"
            await self._constraints.check(
                request.sampling.constraint, request.service_class, request.tenant
            )
            prompt = await self._encode(request.input)
            adapter = self.models.adapter_of(request.model)
            cache_use = cache_use_of(request, self._weights, adapter)
            valid = fit_to_context(request_id, request, prompt, cache_use, self._context_length())
            record.prepared(int(valid.prompt.size), self.clock.now())
            stream = ResponseStream(
                valid,
                self.tokenizer.detokenizer,
                eos_token_ids=self.card.eos_token_ids,
                clock=self.clock,
                arrived_at=arrived_at,
            )
            try:
                await self._wait_for_places(visit, valid, control)
                record.placed_at = self.clock.now()
                attempts = self._attempts.run(valid, control, record)
                async with contextlib.aclosing(attempts) as outputs:
                    async for routed in outputs:
                        visit.answered(routed.route.prefill_tokens, len(routed.output.tokens))
                        chunk = stream.take(routed)
                        if chunk.finish is not None:
                            record.answered(chunk.finish)
                        if chunk.tokens or chunk.finish is not None:
                            yield chunk
                        if stream.is_done:
                            return
                        if chunk.finish is not None and routed.output.finish is None:
                            # Its text has met a stop string, of which the worker knows nothing.
                            control.end_sample(chunk.index)
            except RequestCancelled:
                record.outcome = Outcome.CANCELLED
                for chunk in stream.cancelled():
                    yield chunk

    async def _wait_for_places(
        self, visit: Visit, request: ValidRequest, control: RequestControl
    ) -> None:
        """Returns when the request may run. Raises `Overloaded` when it may not."""
        prompt_len, reserve = int(request.prompt.size), self.config.scheduler.output_reserve
        work = work_of(request.sampling, prompt_len, prompt_len, reserve)
        if visit.would_wait(work):
            # What is cached shortens the wait; where there is none, nobody has to know.
            work = work_of(request.sampling, prompt_len, self._uncached(request), reserve)
        await visit.wait_for_places(work, control)

    def _uncached(self, request: ValidRequest) -> int:
        use, prompt_len = request.cache_use, int(request.prompt.size)
        if use.sharing is not Sharing.SHARED:
            return prompt_len
        hashes = prompt_keys(request.prompt, self._block_tokens, use.extra_key)
        return uncached_tokens(self.fleet.view(hashes), prompt_len)

    def _capacity(self) -> FleetCapacity:
        return self.fleet.capacity(self.config.scheduler.running_max)

    @contextlib.contextmanager
    def _in_flight_until(
        self, request_id: RequestId, request: ClientRequest, arrived_at: float
    ) -> Iterator[RequestControl]:
        """The request may be ended from outside, and by its deadline, while inside."""
        if self._is_stopping:
            raise WorkerUnavailable(_SHUTTING_DOWN)
        if request_id in self._in_flight:
            raise DuplicateRequest(request_id)
        longest_s = self.config.router.request_timeout_s
        timeout_s = longest_s if request.timeout_s is None else min(request.timeout_s, longest_s)
        control = RequestControl(arrived_at + timeout_s, request.tenant)
        expired = DeadlineExceeded(f"request {request_id} was not done within {timeout_s:g} s")
        timer = asyncio.get_running_loop().call_later(timeout_s, control.end, expired)
        self._in_flight[request_id] = control
        self._nothing_in_flight.clear()
        try:
            yield control
        finally:
            timer.cancel()
            del self._in_flight[request_id]
            if not self._in_flight:
                self._nothing_in_flight.set()

    async def _encode(self, prompt: PromptInput) -> TokenIds:
        tokens_max = self._context_length()
        if prompt_characters(prompt) <= _INLINE_ENCODE_CHARACTERS_MAX:
            return encode_prompt(prompt, self.tokenizer, tokens_max)
        return await asyncio.to_thread(encode_prompt, prompt, self.tokenizer, tokens_max)

    def _context_length(self) -> int:
        """Bounded by the model and by what fits into a worker's KV memory."""
        slots = self.fleet.kv_slots_max()
        return self.card.context_length if slots is None else min(self.card.context_length, slots)
