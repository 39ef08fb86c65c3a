"""Who may take KV, and who has to give it back: optimistic promises with a bound.

Every admitted request is *promised* slots. A new one is promised its prompt and a share
`output_reserve` of its longest answer; all promises together never exceed what is free or can be
evicted when somebody is admitted. Answers mostly end early; those that outrun their promise take
what is left, and when nothing is left the youngest running request is *retracted*: its KV goes to
the cache, and it waits in order of arrival, with its tokens, to be admitted again.

A retracted request comes back only *assured*: promised its longest sequence, together with every
admitted request that is older. The assured ones are those that arrived no later than `horizon`,
the youngest that ever came back, so one number says who they are.

**No request is retracted twice, and nobody starves.** Call a request *fixed* while its KV cannot
be taken: it is inbound, loading, held for a handoff, or computes a prompt for one; only the last
kind still takes slots. Invariant: if all requests but the assured (A) and the fixed ones (F) gave
up their KV, the longest sequences of A and the prompts of F would fit,

    sum over A and computing F of (promised - taken)  <=  slots - held by A and F.

* It holds when the horizon moves: that is what `try_open` tests for a retracted request.
* A step keeps it: whoever is in A or F takes on both sides, the others are on neither. Nobody but
  F takes what F is promised (`reserved`).
* Every other admission asks for more: the promises of *all*, longest for A, within what is free
  or evictable now.
* An end, a retraction, an adopted handoff only add to the right side or take from the left.

So a shortage of the assured is always cured by retracting others, and only those are retracted: a
request that was retracted once is assured from its return on. The oldest retractable request is
never a victim; it is in A, or all others yield to it, and alone it fits (`check_fits_alone`). It
can only have to wait for F, whose handoffs and copies have deadlines. Nobody
overtakes the oldest waiting request when it was refused, when it was passed over so many times
(`engine.prompt_order`), or while somebody waits who was retracted; so each waiting request becomes
the next one, and is admitted at the latest when everyone before it has ended.

**Who gives way.** KV that goes back to where its prompt was computed (`engine.holding`) is held by
requests that compute nothing and are in F: inbound at one worker, held at the other. They come in
by the same test as everybody else, so the invariant holds with them. And none of them is ever the
reason for a no: when a test fails, or a step lacks slots, they are ended, one after the other, and
it is tried again before anyone is refused or retracted (`Scheduler`). Ending one only adds to what
is free or can be evicted.

**Several samples.** Until its prompt is computed, a request for n samples is promised all of them,
n rows and the pages that n answers do not share (`_promise`), as far as one worker can have that.
So when it parts there normally is room for all. Where others have outrun their promises there may
be none for some: such a sample waits in its order of arrival with its first token and is admitted
like any other request, its prompt found in the cache. A sample is let in (`try_fork`) by the same
tests as everybody else, so the proof needs no case of its own; the samples of one request have
consecutive arrivals, so a horizon never parts them before they part.

**Guesses.** A step may compute guesses at the next tokens of an answer (`engine.speculation`). They
take what is left when the step is planned, not promised to F, and up to the longest answer of their
request; so they are steps of its own taken early, and nobody else's shortage. Slots of those that
were wrong are free again after the step.

**An answer that another worker began.** Each of its samples arrives as a request of its own with
known tokens beyond its prompt, and asks by the test of a new one: for these and its share. What it
can come to need is bounded as ever by prompt and `max_tokens`, whoever chose the tokens so far.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.request import Stage
from kvferry.cache_key import Sharing
from kvferry.errors import InvalidInput
from mem_cache.chunk_cache import ChunkCache
from mem_cache.errors import OutOfRows, OutOfSlots

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.request import Request
    from mem_cache.kv_cache import KVCache


class Admission:
    """Opens and takes back the KV of requests, and knows what each is promised."""

    def __init__(self, kv_cache: KVCache, output_reserve: float) -> None:
        self.horizon = 0
        """Arrival of the youngest request that came back; 0 before the first."""
        self._kv_cache = kv_cache
        self._output_reserve = output_reserve
        self._publishes = not isinstance(kv_cache.tree, ChunkCache)

    def check_fits_alone(self, request: Request) -> None:
        """Raise `InvalidInput` for a request that an empty worker could not hold."""
        cache, longest = self._kv_cache, request.kv_len_max
        capacity = min(cache.num_slots, cache.context_length)
        # Slots come in whole pages; the context is counted in tokens.
        if longest > cache.context_length or self._rounded(longest) > cache.num_slots:
            raise InvalidInput(
                "max_tokens",
                f"prompt of {request.prompt_len} tokens and answer of up to "
                f"{request.sampling.max_tokens} need more than the {capacity} tokens of KV "
                "of this worker",
            )

    # --- letting in -----------------------------------------------------------------------------

    def try_open(
        self, request: Request, admitted: Iterable[Request], expected: Iterable[Request] = ()
    ) -> bool:
        """Give a waiting or expected request its row, its cached prefix and its promise.

        `admitted` are the requests that hold KV now, `expected` those for whom room is kept. False:
        not now; nothing has changed.
        """
        admitted = list(admitted)
        if not self._has_rows(request, admitted) or not self._open(request):
            return False
        # Looked at after the prefix is locked: a hit takes capacity that could be evicted.
        if request.retractions:
            fits = self._assure(request, admitted)
        else:
            wanted = sum(map(self.promised, expected)) + self.outstanding(request)
            fits = wanted <= self.slack(admitted)
        if not fits:
            self._kv_cache.release(request.held_kv, None)
            request.kv = None
        return fits

    def is_expected_to_fit(
        self, request: Request, admitted: list[Request], expected: list[Request]
    ) -> bool:
        """Whether KV that another worker computes could be taken in now, without looking for what
        of it is cached."""
        if not self._has_rows(request, admitted, expected):
            return False
        return sum(map(self.promised, [*expected, request])) <= self.slack(admitted)

    def try_fork(self, parent: Request, sample: Request, admitted: list[Request]) -> bool:
        """Give a sample the KV of the prompt that `parent` has just computed, and its promise.

        Whole pages are shared, the rest is copied. False: not now; nothing has changed.
        """
        copied = self._rounded(parent.prompt_len) - self._shared_len(parent)
        # What it has after the copy is part of what it is promised.
        wanted = self.promised(sample) - self._shared_len(parent)
        is_assured = sample.arrival <= self.horizon
        room = self._assured_slack(admitted, self.horizon) if is_assured else self.slack(admitted)
        at_once = self.available - self.reserved(admitted)
        if wanted > room or copied > at_once or self._free_rows(admitted) < 1:
            return False
        try:
            sample.kv = self._kv_cache.fork(parent.held_kv, sample.id)
        except (OutOfRows, OutOfSlots):
            return False
        return True

    def try_hold(
        self, request: Request, admitted: list[Request], expected: Iterable[Request]
    ) -> bool:
        """Lock what is cached of a request that will compute nothing. False: nothing is cached, or
        it would be in somebody's way; nothing has changed."""
        if not self._has_rows(request, admitted) or not self._open(request):
            return False
        # Looked at after the lock, as in `try_open`.
        room = self.slack(admitted) - sum(map(self.promised, expected))
        if request.held_kv.committed_len and room >= 0:
            return True
        self._kv_cache.release(request.held_kv, None)
        request.kv = None
        return False

    def retract(self, request: Request) -> None:
        """Take the KV of a running request; what is computed stays as evictable cache."""
        assert request.is_retractable, f"{request.id} is {request.stage}"
        assert request.arrival > self.horizon, f"{request.id} was assured to stay"
        kv, request.kv = request.held_kv, None
        request.retractions += 1
        assert request.retractions <= 1, f"{request.id} is retracted a second time"
        request.retracted_len = kv.committed_len
        self._kv_cache.release(kv, request.tokens[: kv.committed_len])

    def load_back(self, request: Request) -> bool:
        """Whether lower tiers are sending more of the prefix of a request just opened."""
        return self._kv_cache.load_back(request.held_kv, request.known) > 0

    # --- counting -------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Slots that a step can take."""
        return self._kv_cache.free_or_evictable()

    def slack(self, admitted: Iterable[Request]) -> int:
        """Available slots that are promised to nobody; below 0 when requests outran promises."""
        admitted = list(admitted)
        # A load takes from the promise of who waits for it when it has succeeded, not before.
        is_loading = any(request.stage is Stage.LOADING for request in admitted)
        loading = self._kv_cache.accounts().loading if is_loading else 0
        return self.available + loading - sum(map(self.outstanding, admitted))

    def slots_needed(self, request: Request, stop: int) -> int:
        """Slots that `request` lacks to compute its tokens up to `stop`."""
        held = request.held_kv.allocated_len
        return 0 if stop <= held else self._rounded(stop) - held

    def reserved(self, admitted: Iterable[Request]) -> int:
        """Available slots that no step may give to others: fixed requests will take them."""
        return sum(
            self.outstanding(request) - request.held_kv.loading_slots
            for request in admitted
            if request.prefill_only
        )

    def promised(self, request: Request) -> int:
        """Slots that a request may count on in all."""
        return self._promise(request, self.horizon)

    def outstanding(self, request: Request) -> int:
        """Slots promised to an admitted request and not yet taken."""
        return self._outstanding(request, self.horizon)

    # --- inside ---------------------------------------------------------------------------------

    def _free_rows(self, admitted: Iterable[Request]) -> int:
        """Rows that are kept for no sample of an admitted prompt."""
        return self._kv_cache.rows.num_free - sum(request.forks_due for request in admitted)

    def _has_rows(
        self, request: Request, admitted: Iterable[Request], expected: Iterable[Request] = ()
    ) -> bool:
        """Whether there are rows for all its samples, beside those of others; for as many as the
        worker has rows, where it has fewer."""
        taken = sum(1 + other.forks_due for other in expected)
        wanted = min(1 + request.forks_due, self._kv_cache.rows.num_rows)
        return taken + wanted <= self._free_rows(admitted)

    def _open(self, request: Request) -> bool:
        use, inbound = request.cache_use, request.stage is Stage.EXPECTED
        try:
            request.kv = self._kv_cache.open(
                request.id,
                request.known[: request.inbound_len] if inbound else request.known,
                use.extra_key,
                inbound=inbound,
                sharing=use.sharing,
                priority=use.priority,
            )
        except OutOfRows:
            return False
        return True

    def _assure(self, request: Request, admitted: Iterable[Request]) -> bool:
        """Move the horizon up to `request` if the invariant will hold."""
        horizon = max(self.horizon, request.last_arrival)
        if self._assured_slack([*admitted, request], horizon) < 0:
            return False
        self.horizon = horizon
        return True

    def _assured_slack(self, admitted: Iterable[Request], horizon: int) -> int:
        """Slots that would be left for others if the assured and the fixed had all they may take,
        and everybody else gave up what he has."""
        kept = [r for r in admitted if r.arrival <= horizon or not r.is_retractable]
        # Others take no more than they have, or are loading, before they can be retracted.
        to_come = sum(
            self._outstanding(other, horizon)
            if other.arrival <= horizon or other.prefill_only
            else other.held_kv.loading_len
            for other in kept
        )
        held = self._kv_cache.held_slots(other.held_kv for other in kept)
        return self._kv_cache.num_slots - held - to_come

    def _promise(self, request: Request, horizon: int) -> int:
        """Of a prompt with several samples: what they share, and the rest for each of them."""
        longest = request.kv_len_max
        if request.arrival > horizon:
            share = math.ceil(self._output_reserve * request.sampling.max_tokens)
            # What the next step computes is promised in any case; for a sample that is yet to
            # part from its prompt that is its first token.
            least = request.num_tokens + (request.forks_due > 0)
            longest = min(longest, max(request.prompt_len + share, least))
        one = self._rounded(longest)
        if request.forks_due == 0:
            return one
        all_of_them = one + request.forks_due * (one - self._shared_len(request))
        return min(all_of_them, self._kv_cache.num_slots)

    def _shared_len(self, request: Request) -> int:
        """Tokens of its prompt that its samples will have in common: whole pages, published."""
        if request.cache_use.sharing is Sharing.PRIVATE or not self._publishes:
            return 0
        return request.prompt_len - request.prompt_len % self._kv_cache.page_size

    def _outstanding(self, request: Request, horizon: int) -> int:
        if request.stage is Stage.HELD:
            return 0
        return max(0, self._promise(request, horizon) - request.held_kv.allocated_len)

    def _rounded(self, tokens: int) -> int:
        page = self._kv_cache.page_size
        return -(-tokens // page) * page
