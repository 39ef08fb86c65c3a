"""The decode side's intake over a real engine and a fake handoff driver."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from decode_worker.attempt_stream import Outbox
from decode_worker.intake import CancelAttempt, EndSample, Intake, StartAttempt
from kv_transfer.protocol.key import HandoffKey
from kvferry.cache_key import CacheUse
from kvferry.generation import AttemptOutput, AttemptRequest, PrefillSource
from kvferry.ids import Attempt, AttemptId, ExtraKey, Incarnation, RequestId, WorkerId
from kvferry.sampling import SamplingParams
from tests.support.attempt_log import AttemptLog
from tests.support.engine_bench import EngineBench

if TYPE_CHECKING:
    from engine.request import Request
    from kvferry.errors import KvferryError

SOURCE = PrefillSource(WorkerId("prefill-0"), "127.0.0.1:1", Incarnation(11))
PROMPT = [20, 21, 22, 23, 24, 25]
KEY = HandoffKey(
    request_id=RequestId("r"),
    attempt=Attempt(1),
    source_incarnation=Incarnation(11),
    sink_incarnation=Incarnation(22),
)


@dataclass(eq=False)
class FakeDriver:
    """Remembers what the intake asks of the handoff driver."""

    fetched: list[HandoffKey] = field(default_factory=list)
    asked: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    """Of the source: tokens to compute, and how to choose the next one."""
    aborted: list[HandoffKey] = field(default_factory=list)

    def fetch(
        self,
        key: HandoffKey,
        source: PrefillSource,
        prompt: np.ndarray[Any, np.dtype[np.int32]],
        sampling: SamplingParams,
        cache_use: CacheUse,
        *,
        goes_first: bool,
    ) -> None:
        self.fetched.append(key)
        self.asked.append((prompt.tolist(), sampling))

    def abort_fetch(self, key: HandoffKey, reason: str) -> None:
        self.aborted.append(key)


@dataclass(eq=False)
class FakeReturns:
    """Remembers whose answers were complete, and who had computed their prompts."""

    told: list[tuple[str, PrefillSource]] = field(default_factory=list)

    def offer(self, request: Request, computed_by: PrefillSource) -> None:
        assert request.kv is None, "its KV is not published yet"
        self.told.append((request.id.request_id, computed_by))


class IntakeBench:
    """An intake over a real engine and a fake driver."""

    def __init__(self, **engine: Any) -> None:
        self.engine_bench = EngineBench(**engine)
        self.driver = FakeDriver()
        self.loop = asyncio.new_event_loop()
        self.returns = FakeReturns()
        self.intake = Intake(
            self.engine_bench.engine,
            self.driver,
            Incarnation(22),
            Outbox(self.loop),
            self.returns,
        )

    def start(self, *, source: PrefillSource | None, **options: Any) -> AttemptLog:
        sampling = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
        prompt = options.pop("prompt", PROMPT)
        attempt = AttemptRequest(
            id=AttemptId(RequestId(str(options.pop("name", "r"))), Attempt(1)),
            prompt=np.asarray(prompt, dtype=np.int32),
            cache_use=options.pop("cache_use", CacheUse(ExtraKey(""))),
            resumed=tuple(options.pop("resumed", ())),
            sampling=SamplingParams(**sampling | options),
            source=source,
        )
        stream = AttemptLog(attempt.samples_left)
        assert self.intake.handle(
            StartAttempt(attempt, stream, self.engine_bench.engine.clock.now())
        )
        self.intake.tick()
        return stream

    def cancel(self, stream: AttemptLog) -> None:
        attempt_id = AttemptId(RequestId("r"), Attempt(1))
        assert self.intake.handle(CancelAttempt(attempt_id, stream))

    def end_sample(self, sample: int) -> None:
        attempt_id = AttemptId(RequestId("r"), Attempt(1))
        assert self.intake.handle(EndSample(attempt_id, sample))

    def receive_kv(self) -> None:
        """Do what the driver does between Grant and commit."""
        tokens, _ = self.driver.asked[-1]
        kv = self.intake.reserve(KEY, len(tokens))
        assert kv is not None
        cache, start = self.engine_bench.kv_cache, kv.committed_len
        slots = cache.slots(kv, start, len(tokens))
        known = np.asarray(tokens[start:], dtype=np.int32)
        self.engine_bench.runner.receive(slots, known, start)
        cache.commit(kv, len(tokens))
        cache.adopt(kv)

    def read(self, stream: AttemptLog) -> tuple[list[int], AttemptOutput | KvferryError]:
        """All outputs so far, which must include the end."""
        outputs, error = self.outputs_of(stream)
        ids = [token.token_id for output in outputs for token in output.tokens]
        return ids, outputs[-1] if error is None else error

    def outputs_of(self, stream: AttemptLog) -> tuple[list[AttemptOutput], KvferryError | None]:
        """What has reached the event loop."""
        self.intake.flush()
        self.loop.run_until_complete(asyncio.sleep(0))
        return stream.outputs()

    def read_samples(self, stream: AttemptLog, n: int) -> tuple[list[list[int]], list[int]]:
        """Tokens of each sample, and the samples in the order of their ends."""
        outputs, error = self.outputs_of(stream)
        assert error is None
        ids: list[list[int]] = [[] for _ in range(n)]
        for output in outputs:
            ids[output.sample] += [token.token_id for token in output.tokens]
        return ids, [output.sample for output in outputs if output.finish is not None]
