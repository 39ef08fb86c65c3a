"""KV that is given back: fetched if wanted, cached when it is there, gone when it is in the way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from kv_transfer.protocol.key import HandoffKey
from kv_transfer.protocol.messages import KvOffer
from kvferry.cache_key import CacheUse, Sharing
from kvferry.config import KvReturn
from kvferry.errors import DuplicateRequest, HandoffFailed, Overloaded
from kvferry.generation import AttemptUsage, PrefillSource
from kvferry.ids import Attempt, ExtraKey, Incarnation, RequestId, WorkerId
from prefill_worker.return_sink import RETURNS_MAX, ReturnSink
from tests.support.digest_model import answer
from tests.support.engine_bench import EngineBench

HOLDER = PrefillSource(WorkerId("decode-0"), "127.0.0.1:1", Incarnation(22))
TURN = list(range(20, 41))
"""21 tokens: the KV of 20 of them exists, 5 pages."""
NO_KEY = ExtraKey("")


def _offer(name: str = "r", tokens: list[int] = TURN, sharing: Sharing = Sharing.SHARED) -> KvOffer:
    key = HandoffKey(RequestId(name), Attempt(1), Incarnation(22), Incarnation(11))
    use = CacheUse(NO_KEY, sharing)
    return KvOffer(key, HOLDER.address, np.asarray(tokens, dtype=np.int32), use)


@dataclass(eq=False)
class FakeDriver:
    link_bytes_per_s: float = 0.0
    fetched: list[HandoffKey] = field(default_factory=list)
    aborted: list[HandoffKey] = field(default_factory=list)

    def fetch(self, key, source, prompt, sampling, cache_use, *, held_only) -> None:
        assert held_only
        assert source == HOLDER
        if key in self.fetched:
            raise DuplicateRequest(str(key))
        self.fetched.append(key)

    def abort_fetch(self, key, reason) -> None:
        self.aborted.append(key)


class Bench:
    def __init__(self, policy: KvReturn = KvReturn.ALWAYS, num_slots: int = 64) -> None:
        self.engine_bench = EngineBench(num_slots=num_slots)
        self.driver = FakeDriver()
        self.sink = ReturnSink(self.engine_bench.engine, self.driver, policy)

    def receive(self, offer: KvOffer, tokens: int = 20) -> None:
        """Everything that the driver does until the KV is there."""
        assert self.sink.offered(offer, HOLDER)
        kv = self.sink.reserve(offer.key, tokens)
        cache = self.engine_bench.kv_cache
        start = kv.committed_len
        slots = cache.slots(kv, start, tokens)
        self.engine_bench.runner.receive(slots, offer.tokens[start:tokens], start)
        cache.commit(kv, tokens)
        cache.adopt(kv)
        self.sink.adopted(offer.key, AttemptUsage())

    def assert_over(self) -> None:
        self.engine_bench.assert_idle()
        assert self.engine_bench.engine.scheduler.holding == 0
        assert not self.sink._returns


def test_what_came_back_is_cache_for_the_next_turn():
    bench = Bench()
    bench.receive(_offer())
    bench.assert_over()
    prompt = [*TURN, 50, 51, 52]
    bench.engine_bench.submit("next", prompt, max_tokens=3)
    bench.engine_bench.run()
    assert bench.engine_bench.recorder.hits["next"] == 20
    assert bench.engine_bench.recorder.told["next"] == answer(prompt, 3)


def test_only_what_the_holder_still_has_is_reserved():
    bench = Bench()
    bench.receive(_offer(), tokens=12)
    bench.assert_over()
    assert bench.engine_bench.engine.cached_len(np.asarray(TURN, np.int32), NO_KEY) == 12


def test_what_is_cached_here_is_not_fetched():
    bench = Bench()
    bench.receive(_offer("first"))
    assert not bench.sink.offered(_offer("second"), HOLDER)
    assert bench.sink.offered(_offer("third", [*TURN, 60, 61, 62, 63]), HOLDER)


@pytest.mark.parametrize(
    ("policy", "offer"),
    [
        (KvReturn.NEVER, _offer()),
        (KvReturn.ALWAYS, _offer(sharing=Sharing.PRIVATE)),
        (KvReturn.ALWAYS, _offer(tokens=[])),
        (KvReturn.ALWAYS, _offer(tokens=TURN[:4])),
        (KvReturn.ALWAYS, _offer(tokens=list(range(20, 120)))),
    ],
    ids=["policy", "private", "nothing", "no whole page", "more than there is room"],
)
def test_an_offer_that_is_not_wanted_starts_nothing(policy, offer):
    bench = Bench(policy)
    assert not bench.sink.offered(offer, HOLDER)
    assert not bench.driver.fetched
    bench.assert_over()


def test_an_offer_counts_once_and_not_beyond_the_bound():
    bench = Bench()
    assert bench.sink.offered(_offer("r0"), HOLDER)
    assert not bench.sink.offered(_offer("r0"), HOLDER)
    for number in range(1, RETURNS_MAX):
        assert bench.sink.offered(_offer(f"r{number}"), HOLDER)
    assert not bench.sink.offered(_offer("one too many"), HOLDER)
    # The key of a return that has ended is used up.
    bench.sink.failed(_offer("r0").key, HandoffFailed("lost"))
    assert not bench.sink.offered(_offer("r0"), HOLDER)


@pytest.mark.parametrize("reserved", [False, True])
def test_a_return_that_fails_leaves_nothing(reserved):
    bench = Bench()
    offer = _offer()
    assert bench.sink.offered(offer, HOLDER)
    if reserved:
        bench.sink.reserve(offer.key, 20)
        assert bench.engine_bench.kv_cache.accounts().inbound == 20
    bench.sink.failed(offer.key, HandoffFailed("lost"))
    bench.assert_over()
    assert bench.engine_bench.kv_cache.accounts().free == 64


def test_without_room_it_does_not_wait():
    bench = Bench(num_slots=32)
    offer = _offer()
    assert bench.sink.offered(offer, HOLDER)
    bench.engine_bench.submit("r", list(range(60, 72)), max_tokens=4)
    bench.engine_bench.engine.step()
    with pytest.raises(Overloaded):
        bench.sink.reserve(offer.key, 20)
    bench.sink.failed(offer.key, HandoffFailed("no room"))
    bench.engine_bench.run()
    bench.assert_over()


def test_it_gives_way_to_a_request():
    bench = Bench(num_slots=32)
    offer = _offer()
    assert bench.sink.offered(offer, HOLDER)
    bench.sink.reserve(offer.key, 20)
    bench.engine_bench.submit("r", list(range(60, 72)), max_tokens=4)
    bench.engine_bench.engine.step()
    assert bench.driver.aborted == [offer.key]
    assert bench.engine_bench.engine.scheduler.counters["holdings_given_up"] == 1
    bench.engine_bench.run()
    assert bench.engine_bench.recorder.told["r"] == answer(list(range(60, 72)), 4)
    bench.assert_over()
