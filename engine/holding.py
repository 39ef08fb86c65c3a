"""Requests that compute nothing: they only hold KV while a handoff gives it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.request import Request
from kvferry.ids import AttemptId
from kvferry.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.cache_key import CacheUse
    from kvferry.errors import KvferryError
    from kvferry.generation import FinishReason, OutputToken
    from kvferry.ids import Attempt, RequestId, TokenIds


class _Nobody:
    """The listener of what is never computed: each call is a bug of ours."""

    def admitted(self, request: Request) -> None:
        """It never waits for a step."""
        raise AssertionError(f"{request.id} only holds KV")

    def computing(self, request: Request, tokens: int, layers: int) -> None:
        """It takes part in no step."""
        raise AssertionError(f"{request.id} only holds KV")

    def computed(self, request: Request) -> None:
        """It takes part in no step."""
        raise AssertionError(f"{request.id} only holds KV")

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        """It chooses none."""
        raise AssertionError(f"{request.id} only holds KV")

    def finished(self, request: Request, reason: FinishReason) -> None:
        """Its handoff ends it."""
        raise AssertionError(f"{request.id} only holds KV")

    def gave_up(self, request: Request, error: KvferryError) -> None:
        """It has no constraint."""
        raise AssertionError(f"{request.id} only holds KV")


_NOBODY = _Nobody()


def new_holding(
    request_id: RequestId,
    attempt: Attempt,
    tokens: TokenIds,
    cache_use: CacheUse,
    give_way: Callable[[], None],
) -> Request:
    """A request for `Engine.hold_cached` or `Engine.reserve_returned`.

    `give_way` is called, once at most, when somebody lacks what it holds: it has to end the request
    there and then.
    """
    request = Request(
        id=AttemptId(request_id, attempt),
        prompt=tokens,
        sampling=SamplingParams(),
        cache_use=cache_use,
        eos_token_ids=(),
        listener=_NOBODY,
        prefill_only=True,
    )
    request.give_way = give_way
    return request
