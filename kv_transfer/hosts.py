"""What a worker implements to take part in handoffs. Every call is on the engine thread.

| interface | method | how often per handoff | side effect expected |
|---|---|---|---|
| SourceHost | start or start_held | once, first | queue the prompt; offer what is held |
| | cancel or closed | at most one of them, last | stop, release |
| SinkHost | reserve | once per offer | open an inbound request, or nothing |
| | first_tokens | at most once, before the end | stream them |
| | adopted or failed | one of them, unless the host aborted | run it, or release it |
| OfferHost | offered | whenever a peer gives KV back | fetch it, or nothing |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kv_transfer.protocol.key import HandoffKey
    from kv_transfer.protocol.messages import KvOffer
    from kvferry.cache_key import CacheUse
    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptUsage, OutputToken, PrefillSource
    from kvferry.ids import TokenIds
    from kvferry.sampling import SamplingParams
    from mem_cache.request_kv import RequestKV


class SourceHost(Protocol):
    """The side that computes prompts."""

    def start(
        self,
        key: HandoffKey,
        prompt: TokenIds,
        sampling: SamplingParams,
        cache_use: CacheUse,
        goes_first: bool,
    ) -> None:
        """Queue the prompt, before those of others if it `goes_first`. Raise a `KvferryError` to
        refuse it: the sink is told."""
        ...

    def start_held(self, key: HandoffKey, prompt: TokenIds, cache_use: CacheUse) -> None:
        """Call the driver's `held` with what the cache has of the prompt, if it has anything.

        Raise a `KvferryError` to refuse it.
        """
        ...

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """Ended from outside and unpinned: stop computing, release. What is computed may stay
        in the cache."""
        ...

    def closed(self, key: HandoffKey) -> None:
        """The sink has the KV, and it is unpinned: release."""
        ...


class SinkHost(Protocol):
    """The side that decodes."""

    def reserve(self, key: HandoffKey, prompt_tokens: int) -> RequestKV | None:
        """An inbound request with slots for the whole prompt, or None when there is no room now.

        Tokens [0, committed_len) of it are not transferred; committed_len is a page multiple.
        Raise a `KvferryError` if it can never be served.
        """
        ...

    def first_tokens(self, key: HandoffKey, tokens: tuple[OutputToken, ...]) -> None:
        """Stream them at once, one per sample; the KV is still under way.

        Raise a `KvferryError` if that cannot be: the handoff fails, and `failed` follows.
        """
        ...

    def adopted(self, key: HandoffKey, usage: AttemptUsage) -> None:
        """The prompt's KV is complete and the request private: run it."""
        ...

    def failed(self, key: HandoffKey, error: KvferryError) -> None:
        """The handoff has ended without its KV: release what was reserved.

        `HandoffFailed`, which may be tried again; `Overloaded` or an error of kind INVALID_INPUT
        where the source has refused the prompt for that reason.
        """
        ...


class OfferHost(Protocol):
    """The side that may take KV back from workers that it computed prompts for."""

    def offered(self, offer: KvOffer, holder: PrefillSource) -> bool:
        """Fetch it from `holder` under the key of the offer, or return False: not wanted."""
        ...
