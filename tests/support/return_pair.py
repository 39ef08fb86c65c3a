"""Two workers between which KV goes back, with real engines; the test says who moves next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from decode_worker.return_source import ReturnSource
from engine.engine import Engine
from kv_transfer.protocol.key import HandoffKey
from kvferry.clock import MonotonicClock
from kvferry.config import KvReturn, SchedulerConfig
from kvferry.ids import Attempt, RequestId
from prefill_worker.return_sink import ReturnSink
from tests.support.digest_model import DigestRunner, digest_layout
from tests.support.handoff_pair import NO_KEY, PLAIN_USE, HandoffPair, prompt_of

if TYPE_CHECKING:
    from kvferry.ids import TokenIds
    from tests.support.handoff_pair import TestWorker

PAGE_SIZE = 4
PROMPT = prompt_of(24, seed=5)
TURN: TokenIds = np.concatenate([PROMPT, prompt_of(19, seed=6)])
"""Prompt and answer: the KV of 42 tokens exists, of which 40 fill pages."""
HELD = 40


class ReturnPair(HandoffPair):
    """The prefill worker has computed a prompt for the decode worker, which has answered."""

    def __init__(self) -> None:
        super().__init__(layout=digest_layout(PAGE_SIZE))
        self.engines = {worker: _engine(worker) for worker in (self.prefill, self.decode)}
        decode, prefill = self.decode, self.prefill
        self.source = ReturnSource(
            self.engines[decode], decode.driver, decode.incarnation, KvReturn.ALWAYS
        )
        self.sink = ReturnSink(self.engines[prefill], prefill.driver, KvReturn.ALWAYS)
        decode.driver.announce(decode.address)
        decode.driver.set_hosts(self.source, decode.sink)
        prefill.driver.set_hosts(prefill.source, self.sink, self.sink)
        self.run_turn()

    def run_turn(self) -> None:
        """A handoff of the prompt, then the answer."""
        self.decode.sink.release(self.run("turn", PROMPT))
        cache = self.decode.kv_cache
        kv = cache.open("answer", TURN, NO_KEY)
        start, stop = kv.committed_len, len(TURN) - 1
        assert start == len(PROMPT)
        cache.extend(kv, stop)
        runner = self.engines[self.decode]._runner
        runner.receive(cache.slots(kv, start, stop), TURN[start:stop], start)
        cache.commit(kv, stop)
        cache.release(kv, TURN)

    def return_key(self, name: str = "turn") -> HandoffKey:
        return HandoffKey(
            RequestId(name), Attempt(1), self.decode.incarnation, self.prefill.incarnation
        )

    def offer(self, key: HandoffKey | None = None) -> HandoffKey:
        key = key or self.return_key()
        self.decode.driver.offer(self.prefill.as_source(), key, TURN, PLAIN_USE)
        return key

    def assert_nothing_held(self) -> None:
        """Idle drivers, pools and engines."""
        self.assert_idle()
        assert all(engine.scheduler.holding == 0 for engine in self.engines.values())
        assert not self.sink._returns
        assert not self.source._requests

    def came_back(self) -> int:
        """Tokens of the turn that the prefill worker would find."""
        return self.engines[self.prefill].cached_len(TURN, NO_KEY)

    def content(self, worker: TestWorker) -> list[list[float]]:
        """What the cached slots of the turn hold: the token and position of each."""
        cache = worker.kv_cache
        kv = cache.open("reader", TURN, NO_KEY)
        slots = cache.slots(kv, 0, kv.committed_len)
        held = cache.pool.buffer[0, 0, :, 0, :][slots].tolist()
        cache.release(kv, None)
        return held


def _engine(worker: TestWorker) -> Engine:
    runner = DigestRunner(worker.kv_cache.pool, PAGE_SIZE)
    return Engine(worker.kv_cache, runner, SchedulerConfig(), MonotonicClock())
