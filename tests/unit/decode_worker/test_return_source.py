"""What is offered after a turn, and what is held of it when somebody comes for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from decode_worker.return_source import ReturnSource
from kv_transfer.protocol.key import HandoffKey
from kvferry.cache_key import CacheUse, Sharing
from kvferry.config import KvReturn
from kvferry.errors import Overloaded
from kvferry.generation import PrefillSource
from kvferry.ids import Attempt, ExtraKey, Incarnation, RequestId, WorkerId
from tests.support.digest_model import answer
from tests.support.engine_bench import EngineBench

COMPUTED_BY = PrefillSource(WorkerId("prefill-0"), "127.0.0.1:1", Incarnation(11))
KEY = HandoffKey(RequestId("r"), Attempt(1), Incarnation(22), Incarnation(11))
PROMPT = list(range(20, 30))
USE = CacheUse(ExtraKey(""))


@dataclass(eq=False)
class FakeDriver:
    """Pins as the real one does."""

    bench: EngineBench
    offered: list[tuple[HandoffKey, list[int]]] = field(default_factory=list)
    held_kvs: dict[HandoffKey, object] = field(default_factory=dict)
    aborted: list[HandoffKey] = field(default_factory=list)

    def offer(self, source, key, tokens, cache_use) -> None:
        assert source == COMPUTED_BY
        self.offered.append((key, tokens.tolist()))

    def held(self, key, kv) -> None:
        self.bench.kv_cache.pin(kv)
        self.held_kvs[key] = kv

    def abort_source(self, key, reason) -> None:
        self.aborted.append(key)
        self.unpin(key)

    def unpin(self, key) -> None:
        """What precedes `cancel` and `closed`."""
        self.bench.kv_cache.unpin(self.held_kvs.pop(key))


class Bench:
    def __init__(self, policy: KvReturn = KvReturn.AUTO, *, radix: bool = True) -> None:
        self.engine_bench = EngineBench(num_slots=48, radix=radix)
        self.driver = FakeDriver(self.engine_bench)
        self.source = ReturnSource(self.engine_bench.engine, self.driver, Incarnation(22), policy)

    def finish(self, name: str = "r", use: CacheUse = USE, **options):
        """A request whose answer is complete."""
        request = self.engine_bench.request(name, PROMPT, **options)
        request.cache_use = use
        self.engine_bench.engine.submit(request)
        self.engine_bench.run()
        return request

    def hold(self, tokens: list[int]) -> None:
        self.source.start_held(KEY, np.asarray(tokens, dtype=np.int32), USE)


def test_a_turn_is_offered_with_prompt_and_answer_and_roles_exchanged():
    bench = Bench()
    bench.source.offer(bench.finish(max_tokens=8), COMPUTED_BY)
    assert bench.driver.offered == [(KEY, [*PROMPT, *answer(PROMPT, 8)])]
    bench.engine_bench.assert_idle()


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (KvReturn.NEVER, {}),
        (KvReturn.ALWAYS, {"use": replace(USE, sharing=Sharing.PRIVATE)}),
        (KvReturn.ALWAYS, {"n": 2}),
        # 12 tokens with KV are three pages, of which 10 were in the prompt: no new page.
        (KvReturn.ALWAYS, {"max_tokens": 2}),
    ],
    ids=["policy", "private", "samples", "no whole page"],
)
def test_not_every_turn_is_offered(policy, options):
    bench = Bench(policy)
    bench.source.offer(bench.finish(**options), COMPUTED_BY)
    assert bench.driver.offered == []


def test_without_an_index_nothing_is_offered_and_nothing_held():
    bench = Bench(radix=False)
    bench.source.offer(bench.finish(), COMPUTED_BY)
    assert bench.driver.offered == []
    with pytest.raises(Overloaded):
        bench.hold(PROMPT)
    bench.engine_bench.assert_idle()


@pytest.mark.parametrize("end", ["closed", "cancel"])
def test_what_is_cached_is_held_until_the_handoff_ends(end):
    bench = Bench()
    request = bench.finish(max_tokens=8)
    bench.hold(request.known.tolist())
    kv = bench.driver.held_kvs[KEY]
    assert kv.committed_len == 16
    accounts = bench.engine_bench.kv_cache.accounts()
    assert (accounts.protected, accounts.private) == (16, 0)
    bench.driver.unpin(KEY)
    if end == "closed":
        bench.source.closed(KEY)
    else:
        bench.source.cancel(KEY, "lost")
    bench.engine_bench.assert_idle()
    assert KEY not in bench.source


def test_who_comes_too_late_is_told_so():
    bench = Bench()
    request = bench.finish(max_tokens=8)
    other = list(range(100, 140))
    bench.engine_bench.submit("other", other, max_tokens=8)
    bench.engine_bench.run()
    with pytest.raises(Overloaded):
        bench.hold(request.known.tolist())
    assert bench.engine_bench.engine.scheduler.holding == 0
    bench.engine_bench.assert_idle()


def test_it_gives_way_before_anyone_waits():
    bench = Bench()
    request = bench.finish(max_tokens=8)
    bench.hold(request.known.tolist())
    other = list(range(100, 140))
    bench.engine_bench.submit("other", other, max_tokens=8)
    bench.engine_bench.engine.step()
    assert bench.driver.aborted == [KEY]
    bench.engine_bench.run()
    assert bench.engine_bench.recorder.told["other"] == answer(other, 8)
    bench.engine_bench.assert_idle()
