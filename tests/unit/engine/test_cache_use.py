"""What a request says about the cache reaches its KV."""

from __future__ import annotations

import pytest

from kvferry.cache_key import CacheUse, Sharing
from kvferry.ids import ExtraKey
from tests.support.engine_bench import EngineBench

PROMPT = list(range(20, 40))


@pytest.mark.parametrize("sharing", list(Sharing))
def test_an_admitted_request_has_its_wishes_in_its_kv(sharing: Sharing) -> None:
    bench = EngineBench()
    request = bench.request("r", PROMPT)
    request.cache_use = CacheUse(ExtraKey("tenant"), sharing, -7)
    bench.engine.submit(request)
    bench.engine.step()
    assert request.kv is not None
    assert (request.kv.extra_key, request.kv.sharing, request.kv.priority) == (
        "tenant",
        sharing,
        -7,
    )


def test_an_inbound_request_has_them_too() -> None:
    bench = EngineBench()
    request = bench.request("r", PROMPT)
    request.cache_use = CacheUse(ExtraKey("tenant"), Sharing.PRIVATE, 7)
    bench.engine.submit_inbound(request)
    assert bench.engine.next_expected() is request
    assert bench.engine.reserve_inbound(request)
    assert request.kv is not None
    assert (request.kv.sharing, request.kv.priority) == (Sharing.PRIVATE, 7)
