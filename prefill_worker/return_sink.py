"""KV that decode workers give back after a turn: fetch it, put it into the cache, forget it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from engine.holding import new_holding
from engine.request import Request, Stage
from kvferry.cache_key import Sharing
from kvferry.errors import DuplicateRequest, Overloaded
from kvferry.sampling import SamplingParams
from prefill_worker.return_policy import ReturnFacts, is_worth_fetching

if TYPE_CHECKING:
    from engine.engine import Engine
    from kv_transfer.driver import HandoffDriver
    from kv_transfer.protocol.key import HandoffKey
    from kv_transfer.protocol.messages import KvOffer
    from kvferry.config import KvReturn
    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptUsage, OutputToken, PrefillSource
    from mem_cache.request_kv import RequestKV

RETURNS_MAX = 8
"""Fetched at once. Each takes a row while its KV comes in; more than this says that links are
slower than answers, and then computing is no worse."""


@dataclass(slots=True, eq=False)
class _Return:
    offer: KvOffer
    request: Request | None = None
    """From the reservation on; until then nothing is held."""


class ReturnSink:
    """The `OfferHost` of the handoff driver, and the `SinkHost` of what it fetches.

    A return is in `_returns` from its offer to its one end, whatever that is. It waits for nothing:
    where there is no room when the KV could come, it ends.
    """

    def __init__(self, engine: Engine, driver: HandoffDriver, policy: KvReturn) -> None:
        self._engine = engine
        self._driver = driver
        self._policy = policy
        self._returns: dict[HandoffKey, _Return] = {}

    def __contains__(self, key: HandoffKey) -> bool:
        return key in self._returns

    def offered(self, offer: KvOffer, holder: PrefillSource) -> bool:
        """Fetch it if that is cheaper than to compute it, should it be needed."""
        key = offer.key
        if key in self._returns or len(self._returns) >= RETURNS_MAX:
            return False
        if offer.cache_use.sharing is not Sharing.SHARED:
            return False
        if not is_worth_fetching(self._policy, self._facts(offer)):
            return False
        self._returns[key] = _Return(offer)
        try:
            self._driver.fetch(
                key, holder, offer.tokens, SamplingParams(), offer.cache_use, held_only=True
            )
        except DuplicateRequest:
            del self._returns[key]
            return False
        return True

    def reserve(self, key: HandoffKey, prompt_tokens: int) -> RequestKV | None:
        """Row and slots for what the holder still has. Raises `Overloaded` if there is no room:
        a return is not worth waiting."""
        entry = self._returns[key]
        offer = entry.offer
        request = new_holding(
            key.request_id,
            key.attempt,
            offer.tokens[:prompt_tokens],
            offer.cache_use,
            partial(self._give_up, key),
        )
        if not self._engine.reserve_returned(request):
            raise Overloaded("no room for KV that is given back", 1.0)
        entry.request = request
        return request.held_kv

    def first_tokens(self, key: HandoffKey, tokens: tuple[OutputToken, ...]) -> None:
        """The core lets none pass."""
        assert not tokens, f"{key}: first tokens of a prompt that nobody computes"

    def adopted(self, key: HandoffKey, usage: AttemptUsage) -> None:
        """It is all here: from now on it is cache like any other."""
        request = self._returns.pop(key).request
        assert request is not None, f"{key}: adopted without a reservation"
        self._engine.keep_returned(request)

    def failed(self, key: HandoffKey, error: KvferryError) -> None:
        """It does not come. It will be computed when it is needed."""
        self._end(key)

    def _give_up(self, key: HandoffKey) -> None:
        self._driver.abort_fetch(key, "others need the room")
        self._end(key)

    def _end(self, key: HandoffKey) -> None:
        request = self._returns.pop(key).request
        if request is not None and request.stage is not Stage.ENDED:
            self._engine.end(request)

    def _facts(self, offer: KvOffer) -> ReturnFacts:
        kv_cache = self._engine.kv_cache
        # The last token of an answer is never fed back: nobody has its KV.
        offered = kv_cache.layout.round_down(max(0, len(offer.tokens) - 1))
        own = self._engine.cached_len(offer.tokens[:offered], offer.cache_use.extra_key)
        return ReturnFacts(
            missing_tokens=offered - own,
            room_tokens=self._engine.scheduler.room,
            bytes_per_token=kv_cache.layout.bytes_per_token * len(kv_cache.rank_pools),
            link_bytes_per_s=self._driver.link_bytes_per_s,
            prefill_tokens_per_s=self._engine.prefill_tokens_per_s,
        )
