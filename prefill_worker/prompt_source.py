"""Prompts that other workers asked for: compute, hand over, release when closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.request import Request, Stage
from kvferry.ids import AttemptId

if TYPE_CHECKING:
    from engine.engine import Engine
    from kv_transfer.driver import HandoffDriver
    from kv_transfer.protocol.key import HandoffKey
    from kvferry.cache_key import CacheUse
    from kvferry.errors import KvferryError
    from kvferry.generation import FinishReason, OutputToken
    from kvferry.ids import TokenIds
    from kvferry.sampling import SamplingParams


class PromptSource:
    """A worker's `SourceHost` for prompts to compute, and the listener of the requests it starts.

    A request's KV is pinned by the driver from `scheduled` until the driver calls `closed` or
    `cancel`; this class ends the request then and nowhere else.
    """

    def __init__(self, engine: Engine, driver: HandoffDriver) -> None:
        self._engine = engine
        self._driver = driver
        self._requests: dict[HandoffKey, Request] = {}
        self._keys: dict[Request, HandoffKey] = {}

    def start(
        self,
        key: HandoffKey,
        prompt: TokenIds,
        sampling: SamplingParams,
        cache_use: CacheUse,
        goes_first: bool,
    ) -> None:
        """Queue a prompt. Raises `Overloaded`, `InvalidInput` and `AdapterNotLoaded`."""
        self._engine.check_input(prompt, sampling)
        self._engine.check_adapter(cache_use.adapter)
        request = Request(
            id=AttemptId(key.request_id, key.attempt),
            prompt=prompt,
            sampling=sampling,
            cache_use=cache_use,
            eos_token_ids=self._engine.eos_token_ids,
            listener=self,
            prefill_only=True,
        )
        request.goes_first = goes_first
        self._engine.submit(request)
        self._requests[key] = request
        self._keys[request] = key

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """The handoff was aborted; what is computed stays in the radix cache."""
        self._end(key)

    def closed(self, key: HandoffKey) -> None:
        """The sink has the KV; ours stays in the radix cache."""
        self._end(key)

    def admitted(self, request: Request) -> None:
        """The prompt has row and prefix: offer it to the sink while it is computed."""
        kv = request.held_kv
        self._driver.scheduled(self._keys[request], kv, kv.prefix_len)

    def computing(self, request: Request, tokens: int, layers: int) -> None:
        """Some layers of a chunk may leave before the others are computed."""
        self._driver.computing(self._keys[request], tokens, layers)

    def computed(self, request: Request) -> None:
        """A chunk of the prompt may leave."""
        self._driver.computed(self._keys[request], request.held_kv.committed_len)

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        """The whole prompt is computed and the first token of each sample chosen."""
        self._driver.finished(self._keys[request], tokens)

    def finished(self, request: Request, reason: FinishReason) -> None:
        """Never called: a prefill-only request is held until the handoff ends it."""
        raise AssertionError(f"{request.id} finished at the source: {reason}")

    def gave_up(self, request: Request, error: KvferryError) -> None:
        """Its constraint allows no first token."""
        key = self._keys[request]
        self._driver.abort_source(key, str(error))
        self._end(key)

    def _end(self, key: HandoffKey) -> None:
        request = self._requests.pop(key)
        del self._keys[request]
        if request.stage is not Stage.ENDED:
            self._engine.end(request)
