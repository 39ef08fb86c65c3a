"""One sequence inside the engine: its tokens, its KV and where it stands.

A request for several samples is one sequence until its prompt is computed. Then it goes on as
sample 0, and `fork` makes a sequence of every other sample. Of an answer that another worker began,
each sample is a sequence of its own from the beginning (`resume`).
"""

from __future__ import annotations

import copy
import itertools
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvferry.generation import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvferry.cache_key import CacheUse
    from kvferry.errors import KvferryError
    from kvferry.generation import OutputToken
    from kvferry.ids import AttemptId, TokenIds
    from kvferry.sampling import SamplingParams
    from mem_cache.request_kv import RequestKV


class Stage(Enum):
    """Where a request stands. Each stage but ENDED is in exactly one list of the scheduler."""

    WAITING = "waiting"
    """Accepted; holds no KV. New, or with what it has generated: retracted, a sample without room,
    or one that another worker began."""
    EXPECTED = "expected"
    """Its KV is being computed elsewhere; holds nothing here, but room is kept for it."""
    INBOUND = "inbound"
    """Holds row and slots that a handoff is filling."""
    LOADING = "loading"
    """Holds row and slots that a lower tier of the cache is filling; computes nothing."""
    PREFILLING = "prefilling"
    """Holds row and slots; part of its known tokens is still to be computed."""
    DECODING = "decoding"
    """Computes one token a step."""
    HELD = "held"
    """Prompt computed; KV kept for the handoff that reads it."""
    ENDED = "ended"
    """Holds nothing."""


STAGE_MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset(
        {
            Stage.EXPECTED,
            Stage.LOADING,
            Stage.PREFILLING,
            Stage.DECODING,
            Stage.HELD,
            Stage.ENDED,
        }
    ),
    Stage.EXPECTED: frozenset({Stage.INBOUND, Stage.WAITING, Stage.ENDED}),
    Stage.INBOUND: frozenset({Stage.DECODING, Stage.ENDED}),
    Stage.LOADING: frozenset({Stage.PREFILLING, Stage.ENDED}),
    Stage.PREFILLING: frozenset({Stage.DECODING, Stage.HELD, Stage.WAITING, Stage.ENDED}),
    Stage.DECODING: frozenset({Stage.WAITING, Stage.ENDED}),
    Stage.HELD: frozenset({Stage.ENDED}),
    Stage.ENDED: frozenset(),
}
"""Back to WAITING: from EXPECTED when its prompt is computed here after all, from PREFILLING and
DECODING when it is retracted. Straight to DECODING: a further sample of a computed prompt.
Straight to HELD: cached KV that a handoff gives back, see `engine.holding`."""

_arrivals = itertools.count(1)


class RequestListener(Protocol):
    """What the engine tells the worker role that submitted a request. On the engine thread.

    For each submitted request: `admitted` once, `computed` once per computed chunk, `tokens` for
    the first token of every sample, and again for each further token of each, then `finished` for
    each, unless the role ends it itself with `Engine.end`. Samples are told of by requests of
    their own, `Request.siblings`. A request that is retracted computes chunks again; nothing else
    is told twice.
    """

    def admitted(self, request: Request) -> None:
        """The request has its row and its prefix; `request.kv.prefix_len` tokens were cached,
        `request.kv.host_hit_len` of them in a lower tier."""
        ...

    def computing(self, request: Request, tokens: int, layers: int) -> None:
        """Amid a step, only if `prefill_only`: the KV of tokens [0, tokens) is in the pool in
        layers [0, layers). Nothing of the engine may be changed now."""
        ...

    def computed(self, request: Request) -> None:
        """`request.kv.committed_len` tokens are in the pool."""
        ...

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        """Tokens were chosen: `tokens[i]` of the sample `request.sample + i`. The first ones of
        all samples at once, then one of one sample at a time."""
        ...

    def finished(self, request: Request, reason: FinishReason) -> None:
        """The answer of one sample is complete and its KV given up."""
        ...

    def gave_up(self, request: Request, error: KvferryError) -> None:
        """Instead of `finished`: its constraint lets nobody go on. Has to end it there and then,
        after whoever pins its KV has let go."""
        ...


class Request:
    """A sequence that the engine extends token by token.

    Attributes:
        tokens: [prompt_len + max_tokens] int32, of which `num_tokens` are known. Room for one token
            of the answer if `prefill_only`.
        kv: row and slots, from admission to the end.
        prefill_only: stop after the first tokens and hold the KV for a handoff.
        give_way: of a request that is in nobody's way (`engine.holding`): ends it, when somebody
            lacks what it holds.
        goes_first: whether its prompt is computed before those of others (`engine.prompt_order`).
        passed_over: steps that computed nothing of its prompt because others went first.
        sample: which sample of its prompt this is. 0 stands for all until the prompt is computed.
        siblings: the requests of the other samples, once there are any. Of sample 0 alone.
        arrival: number in the order of arrival at this process, from 1. Kept through a retraction.
            The samples of one prompt have consecutive numbers.
        announced: whether the listener was told `admitted`.
        retractions: how often its KV was taken away; at most once, see `engine.admission`.
        retracted_len: tokens whose KV it had when that happened.
    """

    __slots__ = (
        "announced",
        "arrival",
        "cache_use",
        "give_way",
        "goes_first",
        "id",
        "kv",
        "listener",
        "num_tokens",
        "passed_over",
        "prefill_only",
        "prompt_len",
        "retracted_len",
        "retractions",
        "sample",
        "sampling",
        "siblings",
        "stage",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        *,
        id: AttemptId,
        prompt: TokenIds,
        sampling: SamplingParams,
        cache_use: CacheUse,
        eos_token_ids: tuple[int, ...],
        listener: RequestListener,
        prefill_only: bool = False,
    ) -> None:
        self.id = id
        self.sampling = sampling
        self.cache_use = cache_use
        self.listener = listener
        self.prefill_only = prefill_only
        self.goes_first = False
        self.passed_over = 0
        self.give_way: Callable[[], None] | None = None
        self.prompt_len = len(prompt)
        self.num_tokens = len(prompt)
        # The source of a handoff only chooses the first token.
        room = 1 if prefill_only else sampling.max_tokens
        self.tokens: TokenIds = np.empty(len(prompt) + room, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.stop_ids |= frozenset(eos_token_ids)
        self.kv: RequestKV | None = None
        self.stage = Stage.WAITING
        self.sample = 0
        self.siblings: tuple[Request, ...] = ()
        self.arrival = next(_arrivals)
        for _ in range(self.forks_due):
            next(_arrivals)
        self.announced = False
        self.retractions = 0
        self.retracted_len = 0

    @property
    def prompt(self) -> TokenIds:
        """[prompt_len] int32, a view."""
        return self.tokens[: self.prompt_len]

    @property
    def output(self) -> TokenIds:
        """[num_tokens - prompt_len] int32, a view."""
        return self.tokens[self.prompt_len : self.num_tokens]

    @property
    def known(self) -> TokenIds:
        """[num_tokens] int32, prompt and answer so far, a view."""
        return self.tokens[: self.num_tokens]

    @property
    def inbound_len(self) -> int:
        """Known tokens whose KV another worker would send: the prompt, and of an answer that goes
        on here all but its last token, with which the next step begins."""
        return max(self.prompt_len, self.num_tokens - 1)

    @property
    def samples(self) -> tuple[Request, ...]:
        """This request and those that were forked from it; index i is sample i of sample 0."""
        return (self, *self.siblings)

    @property
    def firsts_due(self) -> int:
        """Tokens that the next logits are to give: one per sample at the end of the prompt."""
        return self.sampling.n if self.num_tokens == self.prompt_len else 1

    @property
    def forks_due(self) -> int:
        """Requests that this one will be forked into, beside itself, at the end of its prompt."""
        return 0 if self.prefill_only else self.firsts_due - 1

    @property
    def last_arrival(self) -> int:
        """The arrival of the youngest request that this one stands for."""
        return self.arrival + self.forks_due

    @property
    def held_kv(self) -> RequestKV:
        """Its KV, which it must hold now."""
        assert self.kv is not None, f"{self.id} holds no KV"
        return self.kv

    @property
    def uncomputed(self) -> int:
        """Known tokens whose KV is not in the pool: what is to be computed before the next."""
        return self.num_tokens - (0 if self.kv is None else self.kv.committed_len)

    @property
    def is_retractable(self) -> bool:
        """Whether its KV may be taken away: nobody else reads or writes it."""
        running = self.stage in (Stage.PREFILLING, Stage.DECODING)
        return running and not self.prefill_only

    @property
    def kv_len_max(self) -> int:
        """Most tokens whose KV this request can come to hold."""
        # The last token of an answer is never fed back, so its KV is never computed.
        return self.prompt_len if self.prefill_only else len(self.tokens) - 1

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that would end the answer before `min_tokens`."""
        if self.num_tokens - self.prompt_len < self.sampling.min_tokens:
            return tuple(self.stop_ids)
        return ()

    def resume(self, sample: int, told: Sequence[int]) -> None:
        """Before it is submitted: stand for this one sample alone, and go on after `told`, what
        its client has of it, as if it had been chosen here."""
        assert self.stage is Stage.WAITING, f"{self.id} is {self.stage}"
        assert len(told) <= self.sampling.max_tokens, f"{self.id}: {len(told)} tokens told"
        self.sample, self.sampling = sample, self.sampling.of_sample(sample)
        self.num_tokens += len(told)
        self.tokens[self.prompt_len : self.num_tokens] = told

    def append(self, token_id: int) -> None:
        """Take the next token of the answer."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def fork(self, firsts: Sequence[int]) -> None:
        """Go on as sample 0 with the first of `firsts`; one sibling begins with each other one."""
        assert len(firsts) == self.firsts_due, f"{self.id}: {len(firsts)} first tokens"
        self.siblings = tuple(self._sibling(sample) for sample in range(1, len(firsts)))
        for request, token_id in zip(self.samples, firsts, strict=True):
            request.append(token_id)

    def _sibling(self, sample: int) -> Request:
        sibling = copy.copy(self)
        sibling.sample = sample
        sibling.sampling = self.sampling.of_sample(sample)
        sibling.arrival = self.arrival + sample
        sibling.tokens = self.tokens.copy()
        sibling.kv, sibling.stage, sibling.siblings = None, Stage.WAITING, ()
        sibling.retractions = sibling.retracted_len = 0
        # Its prompt was announced as that of all samples.
        sibling.announced = True
        return sibling

    def finish_reason(self) -> FinishReason | None:
        """Whether the last token ends the answer."""
        if self.num_tokens == self.prompt_len:
            return None
        if int(self.tokens[self.num_tokens - 1]) in self.stop_ids:
            return FinishReason.STOP
        if self.num_tokens == len(self.tokens):
            return FinishReason.LENGTH
        return None

    def move_to(self, stage: Stage) -> None:
        """Change the stage along `STAGE_MOVES`; anything else is a bug of ours."""
        assert stage in STAGE_MOVES[self.stage], f"{self.id}: {self.stage} -> {stage}"
        self.stage = stage
