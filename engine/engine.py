"""The step: schedule -> forward -> sample -> commit -> tell. One thread owns all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.forward_batch import SequenceStep, build_forward_batch
from engine.request import Request, Stage
from engine.sampler import SamplingRow, sample
from engine.scheduler import Scheduler, StepItem
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.model_runner import ModelRunner
    from kvferry.clock import Clock
    from kvferry.config import SchedulerConfig
    from kvferry.generation import OutputToken
    from kvferry.ids import TokenIds
    from kvferry.sampling import SamplingParams
    from mem_cache.kv_cache import KVCache

_RATE_MEMORY = 0.8
"""Share of the old value in the running mean of the prefill rate."""


class Engine:
    """Runs sequences of either role: prompts to hold, handed-in KV to decode, or both.

    Not thread-safe: only the engine thread calls it.
    """

    def __init__(
        self, kv_cache: KVCache, runner: ModelRunner, config: SchedulerConfig, clock: Clock
    ) -> None:
        self.kv_cache = kv_cache
        self.scheduler = Scheduler(kv_cache, config)
        self.clock = clock
        self.prefill_tokens_per_s = 0.0
        self.steps = 0
        self._config = config
        self._runner = runner

    @property
    def attempts_max(self) -> int:
        """Requests a worker takes on at once, whoever computes their prompts."""
        return self._config.running_max + self._config.queue_max

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer unless the request ignores them."""
        return self._runner.spec.eos_token_ids

    def check_input(self, prompt: TokenIds, sampling: SamplingParams) -> None:
        """Raise `InvalidInput` for what would break a step. Routers check too, peers may not."""
        vocab_size, context_length = self._runner.spec.vocab_size, self.kv_cache.context_length
        if len(prompt) == 0:
            raise InvalidInput("prompt", "is empty")
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
            raise InvalidInput("prompt", f"has token ids outside 0..{vocab_size - 1}")
        sampling.validate(vocab_size)
        if sampling.max_tokens > context_length:
            raise InvalidInput("max_tokens", f"is more than the context of {context_length}")

    def check_token(self, token_id: int) -> None:
        """Raise `InvalidInput` for a token that a peer chose and the model does not have."""
        if not 0 <= token_id < self._runner.spec.vocab_size:
            raise InvalidInput("first_token", f"{token_id} is no token of this model")

    def submit(self, request: Request) -> None:
        """Queue a request whose prompt is computed here. Raises `Overloaded`, `InvalidInput`."""
        self.scheduler.enqueue(request)

    def submit_inbound(self, request: Request) -> None:
        """Queue a request whose KV another worker will send. Raises `InvalidInput`."""
        self.scheduler.defer(request)

    def next_expected(self) -> Request | None:
        """The oldest such request if there is, or soon will be, space: have its KV sent now."""
        return self.scheduler.next_expected()

    def compute_here(self, request: Request) -> None:
        """The KV of an expected request will not be sent: compute its prompt like any other."""
        self.scheduler.compute_here(request)

    def reserve_inbound(self, request: Request) -> bool:
        """Row and slots for the prompt of an expected request.

        False: no space now; nothing has changed.
        """
        if not self.scheduler.admit_inbound(request):
            return False
        assert request.kv is not None, "admitted above"
        self.kv_cache.extend(request.kv, request.prompt_len)
        return True

    def adopt(self, request: Request, first: OutputToken) -> None:
        """The KV of the whole prompt has arrived and is ours: publish it and decode on.

        `first` is the token the source chose; its listener has been told already.
        """
        assert request.kv is not None, f"{request.id} holds no KV"
        self.kv_cache.checkpoint(request.kv, request.prompt)
        self.scheduler.start_decoding(request)
        request.append(first.token_id)
        self._finish_if_done(request)

    def end(self, request: Request) -> None:
        """End a request in any stage, on its role's decision. The listener is not told.

        What it computed is published, except while others are still writing to its slots.
        """
        is_written_to = request.stage in (Stage.INBOUND, Stage.LOADING)
        self.scheduler.remove(request)
        self._release(request, publish=not is_written_to)

    def step(self) -> bool:
        """Compute one batch. False when there was nothing to compute."""
        loaded = [self.scheduler.loaded(kv) for kv in self.kv_cache.poll()]
        items, admitted = self.scheduler.plan()
        for request in (*loaded, *admitted):
            self._announce(request)
        # A listener may have ended a request of the plan.
        items = [item for item in items if item.request.stage is not Stage.ENDED]
        if not items:
            return False
        started = self.clock.now()
        sampled = self._forward(items)
        self._measure(items, self.clock.now() - started)
        for item in items:
            # The listener of one before it may have ended this one.
            if item.request.stage is not Stage.ENDED:
                self._commit(item)
        for request, token in sampled:
            self._take(request, token)
        self.steps += 1
        return True

    def _announce(self, request: Request) -> None:
        # Not again after a retraction; and a retraction may have come before the announcement.
        if not request.announced and request.kv is not None:
            request.announced = True
            request.listener.admitted(request)

    def _forward(self, items: Sequence[StepItem]) -> list[tuple[Request, OutputToken]]:
        sequences: list[SequenceStep] = []
        choosing: list[Request] = []
        for item in items:
            request, kv = item.request, item.request.kv
            assert kv is not None, f"{request.id} holds no KV"
            assert kv.req_pool_idx is not None, f"{request.id} holds no row"
            self.kv_cache.extend(kv, item.stop)
            chooses = item.stop == request.num_tokens
            if chooses:
                choosing.append(request)
            sequences.append(
                SequenceStep(
                    req_pool_idx=kv.req_pool_idx,
                    token_ids=request.tokens[item.start : item.stop],
                    prefix_len=item.start,
                    wants_logits=chooses,
                )
            )
        batch = build_forward_batch(sequences, self.kv_cache.rows, self.kv_cache.page_size)
        logits = self._runner.forward(batch)
        if not choosing:
            return []
        rows = [
            SamplingRow(request.sampling, request.prompt, request.output, request.banned_ids)
            for request in choosing
        ]
        return list(zip(choosing, sample(logits, rows), strict=True))

    def _commit(self, item: StepItem) -> None:
        request, kv = item.request, item.request.kv
        assert kv is not None, f"{request.id} holds no KV"
        self.kv_cache.commit(kv, item.stop)
        if request.stage is Stage.PREFILLING:
            # Publishing each chunk lets requests that wait behind this one hit it.
            self.kv_cache.checkpoint(kv, request.tokens[: item.stop])
            request.listener.computed(request)

    def _take(self, request: Request, token: OutputToken) -> None:
        if request.stage is Stage.ENDED:
            return
        if request.stage is Stage.PREFILLING and request.prefill_only:
            self.scheduler.hold(request)
            request.listener.token(request, token)
            return
        if request.stage is Stage.PREFILLING:
            self.scheduler.start_decoding(request)
        request.append(token.token_id)
        request.listener.token(request, token)
        self._finish_if_done(request)

    def _finish_if_done(self, request: Request) -> None:
        # A listener may have ended it while it was told of the token.
        reason = request.finish_reason()
        if reason is None or request.stage is Stage.ENDED:
            return
        self.end(request)
        request.listener.finished(request, reason)

    def _release(self, request: Request, *, publish: bool) -> None:
        kv, request.kv = request.kv, None
        if kv is not None:
            self.kv_cache.release(kv, request.tokens[: kv.committed_len] if publish else None)

    def _measure(self, items: Sequence[StepItem], seconds: float) -> None:
        tokens = sum(
            item.stop - item.start for item in items if item.request.stage is Stage.PREFILLING
        )
        if tokens == 0 or seconds <= 0.0:
            return
        rate = tokens / seconds
        old = self.prefill_tokens_per_s
        self.prefill_tokens_per_s = (
            rate if old == 0.0 else _RATE_MEMORY * old + (1 - _RATE_MEMORY) * rate
        )
