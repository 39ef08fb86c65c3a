"""Who may take KV: a request is let in only if it can run to its longest possible end.

Each admitted request is *promised* the pages of its longest possible sequence. Promises plus
what is held never exceed the pool, so decoding never runs out of slots and no running request
has to be thrown out. The price is a smaller batch than optimistic admission would allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import InvalidInput
from mem_cache.errors import OutOfRows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.request import Request
    from mem_cache.kv_cache import KVCache


class Admission:
    """Opens the KV of requests within the promises made so far."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache

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

    def try_open(self, request: Request, admitted: Iterable[Request], *, inbound: bool) -> bool:
        """Give `request` its row, its cached prefix and the promise of its longest sequence.

        `admitted` are the requests that hold KV now. False: not now; nothing has changed.
        """
        use = request.cache_use
        try:
            kv = self._kv_cache.open(
                request.id,
                request.prompt,
                use.extra_key,
                inbound=inbound,
                sharing=use.sharing,
                priority=use.priority,
            )
        except OutOfRows:
            return False
        # Looked at after the prefix is locked: a hit takes capacity that could be evicted.
        own = self._rounded(request.kv_len_max) - self._rounded(kv.allocated_len)
        promised = sum(self._outstanding(other) for other in admitted)
        if own + promised > self._kv_cache.free_or_evictable():
            self._kv_cache.release(kv, None)
            return False
        request.kv = kv
        return True

    def _outstanding(self, request: Request) -> int:
        """Tokens promised to an admitted request and not yet taken."""
        assert request.kv is not None, f"{request.id} holds no KV"
        return self._rounded(request.kv_len_max) - self._rounded(request.kv.allocated_len)

    def _rounded(self, tokens: int) -> int:
        page = self._kv_cache.page_size
        return -(-tokens // page) * page
