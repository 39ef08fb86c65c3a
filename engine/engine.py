"""The step: schedule -> forward -> sample -> commit -> tell. One thread owns all of it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from engine.constraint import Constraints, Outlook
from engine.forward_batch import SequenceStep, build_forward_batch
from engine.request import Request, Stage
from engine.sampler import Sampler, SamplingRow
from engine.scheduler import Scheduler, StepItem
from engine.speculation import Trial
from engine.step_counts import StepCounts
from kvferry.errors import AdapterNotLoaded, InvalidInput, KvferryError
from kvferry.generation import FinishReason
from kvferry.ids import NO_ADAPTER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from engine.speculation import Drafts
    from engine.step_runner import StepRunner
    from kvferry.clock import Clock
    from kvferry.config import SchedulerConfig
    from kvferry.generation import OutputToken, SampleProgress
    from kvferry.grammar import GrammarCompiler
    from kvferry.ids import AdapterId, ExtraKey, TokenIds
    from kvferry.sampling import SamplingParams
    from mem_cache.kv_cache import KVCache

_RATE_MEMORY = 0.8
"""Share of the old value in the running mean of the prefill rate."""


class Engine:
    """Runs sequences of either role: prompts to hold, handed-in KV to decode, or both.

    Not thread-safe: only the engine thread calls it.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        runner: StepRunner,
        config: SchedulerConfig,
        clock: Clock,
        compiler: GrammarCompiler | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """`compiler`: of the constraints of answers; None refuses those. `drafts`: None guesses
        nothing."""
        self.kv_cache = kv_cache
        spec = runner.spec
        self.constraints = Constraints(compiler, spec.vocab_size, spec.eos_token_ids)
        self.scheduler = Scheduler(kv_cache, config)
        self.clock = clock
        self.drafts = drafts
        self.on_accepted: Callable[[Request], None] = lambda request: None
        """Told of every prompt that will be computed here, before it is."""
        self.adapters: frozenset[AdapterId] = frozenset()
        """Those that the runner has."""
        self.sampler = Sampler()
        self.prefill_tokens_per_s = 0.0
        self.steps = 0
        self.step_counts = StepCounts()
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
        """Raise `InvalidInput` for what would break a step. Routers check too, peers may not.

        A constraint begins to be compiled.
        """
        vocab_size, context_length = self._runner.spec.vocab_size, self.kv_cache.context_length
        if len(prompt) == 0:
            raise InvalidInput("prompt", "is empty")
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
            raise InvalidInput("prompt", f"has token ids outside 0..{vocab_size - 1}")
        sampling.validate(vocab_size)
        if sampling.max_tokens > context_length:
            raise InvalidInput("max_tokens", f"is more than the context of {context_length}")
        self.constraints.prepare(sampling)

    def check_adapter(self, adapter: AdapterId) -> None:
        """Raise `AdapterNotLoaded` unless prompts can be computed with it here."""
        if adapter != NO_ADAPTER and adapter not in self.adapters:
            raise AdapterNotLoaded(adapter, self.adapters)

    def check_resumed(self, sampling: SamplingParams, resumed: Sequence[SampleProgress]) -> None:
        """Raise `InvalidInput` for progress that no attempt with this `sampling` can have made."""
        if not resumed:
            return
        if len(resumed) != sampling.n:
            raise InvalidInput("resumed", f"has {len(resumed)} entries, for {sampling.n} samples")
        if all(progress.is_done for progress in resumed):
            raise InvalidInput("resumed", "leaves no sample to go on with")
        for index, progress in enumerate(resumed):
            ids = progress.token_ids
            if len(ids) > sampling.max_tokens:
                raise InvalidInput(
                    f"resumed[{index}]", f"has more than {sampling.max_tokens} tokens"
                )
            if ids and not 0 <= min(ids) <= max(ids) < self._runner.spec.vocab_size:
                raise InvalidInput(f"resumed[{index}]", "has ids that are no tokens of this model")

    def check_firsts(self, request: Request, firsts: Sequence[OutputToken]) -> None:
        """Raise `InvalidInput` unless a peer chose a token of the model for each sample."""
        if len(firsts) != request.firsts_due:
            problem = f"are {len(firsts)}, for {request.firsts_due} samples"
            raise InvalidInput("first_tokens", problem)
        for token in firsts:
            if not 0 <= token.token_id < self._runner.spec.vocab_size:
                raise InvalidInput("first_tokens", f"{token.token_id} is no token of this model")

    def submit(self, request: Request) -> None:
        """Queue a request whose prompt is computed here. Raises `Overloaded`, `InvalidInput`."""
        self.scheduler.enqueue(request)
        self.on_accepted(request)

    def submit_sample(self, request: Request) -> None:
        """Queue a further sample of an accepted attempt, whose prompt is computed here too."""
        self.scheduler.enqueue_sample(request)

    def submit_inbound(self, request: Request) -> None:
        """Queue a request whose KV another worker will send. Raises `InvalidInput`."""
        self.scheduler.defer(request)

    def next_expected(self) -> Request | None:
        """The oldest such request if there is, or soon will be, space: have its KV sent now."""
        return self.scheduler.next_expected()

    def compute_here(self, request: Request) -> None:
        """The KV of an expected request will not be sent: compute its prompt like any other."""
        self.scheduler.compute_here(request)
        self.on_accepted(request)

    def reserve_inbound(self, request: Request) -> bool:
        """Row and slots for what is to be sent of an expected request, its `inbound_len` tokens.

        False: no space now; nothing has changed.
        """
        if not self.scheduler.admit_inbound(request):
            return False
        assert request.kv is not None, "admitted above"
        self.kv_cache.have_slots(request.kv, request.inbound_len)
        return True

    def cached_len(self, tokens: TokenIds, extra_key: ExtraKey) -> int:
        """How many of `tokens` a request would find on the device."""
        return self.kv_cache.tree.match_prefix(tokens, extra_key).last_device_node.end

    def hold_cached(self, request: Request) -> bool:
        """Lock what is cached of a request of `engine.holding`, until it is ended.

        False: nothing is, or there is no row; the request has ended.
        """
        return self.scheduler.hold_cached(request)

    def reserve_returned(self, request: Request) -> bool:
        """Row and slots for KV that another worker gives back, for a request of `engine.holding`.

        False: no room; the request has ended. Raises `InvalidInput` if it could never fit.
        """
        if not self.scheduler.admit_returned(request):
            return False
        self.kv_cache.have_slots(request.held_kv, request.prompt_len)
        return True

    def keep_returned(self, request: Request) -> None:
        """All of it has arrived and is ours: it is cache from now on, and the request ends."""
        self.scheduler.remove(request)
        self._release(request, publish=True)

    def adopt(self, request: Request, firsts: Sequence[OutputToken]) -> None:
        """The KV of all `inbound_len` tokens has arrived and is ours: publish it and decode on.

        `firsts` are the tokens the source chose, one per sample; the listener has been told. Not of
        an answer that goes on: what comes next is known, whatever the source chose.
        """
        assert request.kv is not None, f"{request.id} holds no KV"
        self.kv_cache.checkpoint(request.kv, request.known[: request.inbound_len])
        if request.num_tokens > request.prompt_len:
            self.scheduler.start_decoding(request)
        else:
            self._finish_done(self._go_on(request, firsts))

    def end(self, request: Request) -> None:
        """End a request in any stage, on its role's decision. The listener is not told.

        What it computed is published, except while others are still writing to its slots.
        """
        is_written_to = request.stage in (Stage.INBOUND, Stage.LOADING)
        self.scheduler.remove(request)
        self.constraints.forget(request)
        if self.drafts is not None:
            self.drafts.forget(request)
        self._release(request, publish=not is_written_to)

    def step(self) -> bool:
        """Compute one batch. False when there was nothing to compute."""
        loaded = [self.scheduler.loaded(kv) for kv in self.kv_cache.poll()]
        items, admitted = self.scheduler.plan()
        for request in (*loaded, *admitted):
            self._announce(request)
        # A listener may have ended a request of the plan.
        items = [item for item in items if item.request.stage is not Stage.ENDED]
        items, has_ended = self._constrain(items)
        if not items:
            return has_ended
        if self.drafts is not None:
            items = self.drafts.add(items, *self.scheduler.spare(items), self.kv_cache.page_size)
        self._compute(items)
        self.steps += 1
        return True

    def _compute(self, items: list[StepItem]) -> None:
        """Compute a step and take the tokens that it gives."""
        started = self.clock.now()
        logits = self._forward(items)
        trials = _trials(items)
        sampled = self._choose(logits, trials)
        self._measure(items, self.clock.now() - started)
        for item in items:
            # The listener of one before it may have ended this one.
            if item.request.stage is not Stage.ENDED:
                self._commit(item)
        for trial, tokens in zip(trials, sampled, strict=True):
            self._take(trial.request, tokens)
        if self.drafts is not None:
            self._verify(self.drafts, logits, [trial for trial in trials if trial.draft])

    def _verify(self, drafts: Drafts, logits: torch.Tensor, trials: Sequence[Trial]) -> None:
        """Choose from the logits after each token of a draft for as long as the one before was
        right, for all sequences at once; then give the slots of what was wrong back."""
        going = self._going_on(trials)
        while going:
            for trial, tokens in zip(going, self._choose(logits, going), strict=True):
                self._take(trial.request, tokens)
            going = self._going_on(going)
        for trial in trials:
            drafts.judge(trial)
            if trial.request.stage is Stage.DECODING:
                self.kv_cache.trim(trial.request.held_kv)

    def _going_on(self, trials: Sequence[Trial]) -> list[Trial]:
        passed = [trial for trial in trials if self._goes_on(trial)]
        # The grammar of one may have ended another one of the same attempt.
        return [trial for trial in passed if trial.request.stage is Stage.DECODING]

    def _goes_on(self, trial: Trial) -> bool:
        """Whether the token just taken is that of the draft, and the next one can be chosen now.
        Then the KV that the step computed for it is its own."""
        request = trial.request
        if not trial.passes() or self._look(request) is not Outlook.OPEN:
            return False
        self.kv_cache.commit(request.held_kv, request.num_tokens)
        return True

    def _constrain(self, items: list[StepItem]) -> tuple[list[StepItem], bool]:
        """What of a step can be computed with the grammars of the answers in it, and whether one
        of these has ended an answer."""
        constrained = self.constraints.begin_step(item.request for item in items if item.chooses)
        if not constrained:
            return items, False
        later: set[Request] = set()
        has_ended = False
        for request in constrained:
            if request.stage is Stage.ENDED:
                continue
            outlook = self._look(request)
            has_ended |= outlook is Outlook.COMPLETE
            if outlook is Outlook.LATER:
                later.add(request)
        kept = [i for i in items if i.request not in later and i.request.stage is not Stage.ENDED]
        return kept, has_ended

    def _look(self, request: Request) -> Outlook:
        """Whether the next token of an answer can be chosen now; `COMPLETE`: it has ended here."""
        if request.sampling.constraint is None:
            return Outlook.OPEN
        try:
            outlook = self.constraints.look(request)
        except KvferryError as error:
            request.listener.gave_up(request, error)
            return Outlook.COMPLETE
        if outlook is Outlook.COMPLETE:
            self._finish(request, FinishReason.STOP)
        return outlook

    def _announce(self, request: Request) -> None:
        # Not again after a retraction; and a retraction may have come before the announcement.
        if not request.announced and request.kv is not None:
            request.announced = True
            request.listener.admitted(request)

    def _forward(self, items: Sequence[StepItem]) -> torch.Tensor:
        """Compute a step; logits float32 [R, V], those of `_trials` in their order."""
        sequences: list[SequenceStep] = []
        for item in items:
            request, kv = item.request, item.request.kv
            assert kv is not None, f"{request.id} holds no KV"
            assert kv.req_pool_idx is not None, f"{request.id} holds no row"
            self.kv_cache.have_slots(kv, item.stop + len(item.draft))
            token_ids = request.tokens[item.start : item.stop]
            if item.draft:
                token_ids = np.append(token_ids, np.asarray(item.draft, dtype=np.int32))
            sequences.append(
                SequenceStep(
                    req_pool_idx=kv.req_pool_idx,
                    token_ids=token_ids,
                    prefix_len=item.start,
                    wants_logits=item.chooses,
                    draft_len=len(item.draft),
                    adapter=request.cache_use.adapter,
                )
            )
        batch = build_forward_batch(sequences, self.kv_cache.rows, self.kv_cache.page_size)
        return self._runner.forward(batch, _layer_hook(items))

    def _choose(
        self, logits: torch.Tensor, trials: Sequence[Trial]
    ) -> list[tuple[OutputToken, ...]]:
        """The tokens that each of `trials` is due, from its next row of the logits [R, V]."""
        if not trials:
            return []
        rows: list[SamplingRow] = []
        at: list[int] = []
        for trial in trials:
            request = trial.request
            params, allowed = request.sampling, self.constraints.allowed(request)
            several = request.firsts_due > 1
            for index in range(request.firsts_due):
                own = params.of_sample(index) if several else params
                given = (own, request.known, request.prompt_len, request.banned_ids, allowed)
                rows.append(SamplingRow(*given))
                at.append(trial.next_row)
        tokens = iter(self.sampler.sample(logits, rows, at))
        return [tuple(itertools.islice(tokens, trial.request.firsts_due)) for trial in trials]

    def _commit(self, item: StepItem) -> None:
        request, kv = item.request, item.request.kv
        assert kv is not None, f"{request.id} holds no KV"
        self.kv_cache.commit(kv, item.stop)
        if request.stage is Stage.PREFILLING:
            # Publishing each chunk lets requests that wait behind this one hit it.
            self.kv_cache.checkpoint(kv, request.tokens[: item.stop])
            request.listener.computed(request)

    def _take(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        if request.stage is Stage.ENDED:
            return
        if request.prefill_only:
            self.scheduler.hold(request)
            request.listener.tokens(request, tokens)
            return
        went_on = self._go_on(request, tokens)
        request.listener.tokens(request, tokens)
        self._finish_done(went_on)

    def _go_on(self, request: Request, tokens: Sequence[OutputToken]) -> tuple[Request, ...]:
        """Take what was chosen; returns whoever has a new token. The samples of a prompt part
        here: those for which there is no room wait for some, as a retracted request does."""
        if request.stage is not Stage.DECODING:
            self.scheduler.start_decoding(request)
        if request.num_tokens > request.prompt_len:
            request.append(tokens[0].token_id)
            return (request,)
        request.fork([token.token_id for token in tokens])
        for sibling in request.siblings:
            self.scheduler.add_sample(request, sibling)
        return request.samples

    def _finish_done(self, requests: Sequence[Request]) -> None:
        """End those whose last token ends their answer."""
        for request in requests:
            # A listener may have ended it while it was told of the token.
            reason = request.finish_reason()
            if reason is FinishReason.LENGTH and self.constraints.is_complete(request):
                reason = FinishReason.STOP
            if reason is not None and request.stage is not Stage.ENDED:
                self._finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.end(request)
        request.listener.finished(request, reason)

    def _release(self, request: Request, *, publish: bool) -> None:
        kv, request.kv = request.kv, None
        if kv is not None:
            self.kv_cache.release(kv, request.tokens[: kv.committed_len] if publish else None)

    def _measure(self, items: Sequence[StepItem], seconds: float) -> None:
        if self.scheduler.itl_limit is not None:
            self.scheduler.itl_limit.observe(items, seconds)
        tokens = sequences = 0
        for item in items:
            if item.request.stage is Stage.PREFILLING:
                tokens += item.stop - item.start
            else:
                sequences += 1
        self.step_counts.observe(tokens, sequences, seconds)
        if tokens == 0 or seconds <= 0.0:
            return
        rate = tokens / seconds
        old = self.prefill_tokens_per_s
        self.prefill_tokens_per_s = (
            rate if old == 0.0 else _RATE_MEMORY * old + (1 - _RATE_MEMORY) * rate
        )


def _trials(items: Sequence[StepItem]) -> list[Trial]:
    """The sequences of a step whose next token is chosen, with the rows of their logits."""
    trials: list[Trial] = []
    row = 0
    for item in items:
        if item.chooses:
            trials.append(Trial(item.request, item.draft, row))
            row += 1 + len(item.draft)
    return trials


def _layer_hook(items: Sequence[StepItem]) -> Callable[[int], None] | None:
    """Tells those whose KV may leave while the step still computes; None if there are none."""
    leaving = [item for item in items if item.request.prefill_only]
    if not leaving:
        return None

    def on_layers(layers: int) -> None:
        for item in leaving:
            item.request.listener.computing(item.request, item.stop, layers)

    return on_layers
