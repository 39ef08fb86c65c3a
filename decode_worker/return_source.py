"""After a turn: offer its KV to the worker that computed the prompt; hold it while it is read."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from engine.holding import new_holding
from engine.request import Stage
from kv_transfer.protocol.key import HandoffKey
from kvferry.cache_key import Sharing
from kvferry.config import KvReturn
from kvferry.errors import Overloaded

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.request import Request
    from kv_transfer.driver import HandoffDriver
    from kvferry.cache_key import CacheUse
    from kvferry.generation import PrefillSource
    from kvferry.ids import Incarnation, TokenIds


class ReturnSource:
    """The `SourceHost` of prompts of which only what is held is wanted.

    An offer holds nothing: whoever comes for the KV gets what the cache still has by then, locked
    until the handoff ends, and no longer than nobody else needs the room.
    """

    def __init__(
        self, engine: Engine, driver: HandoffDriver, incarnation: Incarnation, policy: KvReturn
    ) -> None:
        self._engine = engine
        self._driver = driver
        self._incarnation = incarnation
        self._policy = policy
        self._requests: dict[HandoffKey, Request] = {}

    def __contains__(self, key: HandoffKey) -> bool:
        return key in self._requests

    def offer(self, request: Request, computed_by: PrefillSource) -> None:
        """The answer of `request` is complete, its KV published: tell who computed the prompt.

        Of several samples nobody knows which one the conversation goes on with: none is offered.
        """
        use = request.cache_use
        if self._policy is KvReturn.NEVER or use.sharing is not Sharing.SHARED:
            return
        # What it computed itself; the last token's KV nobody has.
        held = self._engine.cached_len(request.known[:-1], use.extra_key)
        if request.sampling.n > 1 or held <= request.prompt_len:
            return
        key = HandoffKey(
            request_id=request.id.request_id,
            attempt=request.id.attempt,
            source_incarnation=self._incarnation,
            sink_incarnation=computed_by.incarnation,
        )
        self._driver.offer(computed_by, key, request.known, use)

    def start_held(self, key: HandoffKey, prompt: TokenIds, cache_use: CacheUse) -> None:
        """Hold and send what is cached. Raises `Overloaded` if there is nothing, or no row."""
        give_way = partial(self._give_up, key)
        request = new_holding(key.request_id, key.attempt, prompt, cache_use, give_way)
        if not self._engine.hold_cached(request):
            raise Overloaded("the cache does not hold it any more, or has no row for it", 1.0)
        self._requests[key] = request
        self._driver.held(key, request.held_kv)

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """The handoff was aborted."""
        self._end(key)

    def closed(self, key: HandoffKey) -> None:
        """The other worker has it as well."""
        self._end(key)

    def _give_up(self, key: HandoffKey) -> None:
        self._driver.abort_source(key, "others need the room")
        self._end(key)

    def _end(self, key: HandoffKey) -> None:
        request = self._requests.pop(key)
        if request.stage is not Stage.ENDED:
            self._engine.end(request)
