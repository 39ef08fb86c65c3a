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
can only have to wait for F, whose handoffs and copies have deadlines. Since nobody overtakes the
oldest waiting request, each waiting request becomes the oldest, and is admitted at the latest when
everyone before it has ended.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.request import Stage
from kvferry.errors import InvalidInput
from mem_cache.errors import OutOfRows

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
        if not self._open(request):
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
        self, request: Request, admitted: Iterable[Request], expected: list[Request]
    ) -> bool:
        """Whether KV that another worker computes could be taken in now, without looking for what
        of it is cached."""
        if self._kv_cache.rows.num_free <= len(expected):
            return False
        return sum(map(self.promised, [*expected, request])) <= self.slack(admitted)

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
        return max(0, self._rounded(stop) - request.held_kv.allocated_len)

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

    def _open(self, request: Request) -> bool:
        use = request.cache_use
        try:
            request.kv = self._kv_cache.open(
                request.id,
                request.known,
                use.extra_key,
                inbound=request.stage is Stage.EXPECTED,
                sharing=use.sharing,
                priority=use.priority,
            )
        except OutOfRows:
            return False
        return True

    def _assure(self, request: Request, admitted: Iterable[Request]) -> bool:
        """Move the horizon up to `request` if the invariant will hold."""
        horizon = max(self.horizon, request.arrival)
        kept = [r for r in admitted if r.arrival <= horizon or not r.is_retractable]
        kept.append(request)
        # Others take no more than they have, or are loading, before they can be retracted.
        to_come = sum(
            self._outstanding(other, horizon)
            if other.arrival <= horizon or other.prefill_only
            else other.held_kv.loading_len
            for other in kept
        )
        held = self._kv_cache.held_slots(other.held_kv for other in kept)
        if to_come + held > self._kv_cache.num_slots:
            return False
        self.horizon = horizon
        return True

    def _promise(self, request: Request, horizon: int) -> int:
        longest = request.kv_len_max
        if request.arrival <= horizon:
            return self._rounded(longest)
        share = math.ceil(self._output_reserve * request.sampling.max_tokens)
        # What the next step computes is promised in any case.
        least = max(request.prompt_len + share, request.num_tokens)
        return self._rounded(min(longest, least))

    def _outstanding(self, request: Request, horizon: int) -> int:
        return max(0, self._promise(request, horizon) - request.held_kv.allocated_len)

    def _rounded(self, tokens: int) -> int:
        page = self._kv_cache.page_size
        return -(-tokens // page) * page
