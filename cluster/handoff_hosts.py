"""Which part of a worker a handoff belongs to: the requests of clients, or KV that goes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decode_worker.intake import Intake
    from decode_worker.return_source import ReturnSource
    from kv_transfer.hosts import SinkHost
    from kv_transfer.protocol.key import HandoffKey
    from kvferry.cache_key import CacheUse
    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptUsage, OutputToken
    from kvferry.ids import TokenIds
    from kvferry.sampling import SamplingParams
    from mem_cache.request_kv import RequestKV
    from prefill_worker.prompt_source import PromptSource
    from prefill_worker.return_sink import ReturnSink


class WorkerSource:
    """The `SourceHost` of a worker: prompts that it computes, KV that it gives back."""

    def __init__(self, prompts: PromptSource, returns: ReturnSource) -> None:
        self._prompts = prompts
        self._returns = returns

    def start(
        self,
        key: HandoffKey,
        prompt: TokenIds,
        sampling: SamplingParams,
        cache_use: CacheUse,
        goes_first: bool,
    ) -> None:
        """A prompt to compute."""
        self._prompts.start(key, prompt, sampling, cache_use, goes_first)

    def start_held(self, key: HandoffKey, prompt: TokenIds, cache_use: CacheUse) -> None:
        """KV to give back."""
        self._returns.start_held(key, prompt, cache_use)

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """Either."""
        self._of(key).cancel(key, reason)

    def closed(self, key: HandoffKey) -> None:
        """Either."""
        self._of(key).closed(key)

    def _of(self, key: HandoffKey) -> PromptSource | ReturnSource:
        return self._returns if key in self._returns else self._prompts


class WorkerSink:
    """The `SinkHost` of a worker: attempts that it decodes, KV that comes back to it."""

    def __init__(self, intake: Intake, returns: ReturnSink) -> None:
        self._intake = intake
        self._returns = returns

    def reserve(self, key: HandoffKey, prompt_tokens: int) -> RequestKV | None:
        """Either."""
        return self._of(key).reserve(key, prompt_tokens)

    def first_tokens(self, key: HandoffKey, tokens: tuple[OutputToken, ...]) -> None:
        """Of an attempt."""
        self._of(key).first_tokens(key, tokens)

    def adopted(self, key: HandoffKey, usage: AttemptUsage) -> None:
        """Either."""
        self._of(key).adopted(key, usage)

    def failed(self, key: HandoffKey, error: KvferryError) -> None:
        """Either."""
        self._of(key).failed(key, error)

    def _of(self, key: HandoffKey) -> SinkHost:
        return self._returns if key in self._returns else self._intake
