"""One worker's driver between fake sessions, at which anything may be thrown.

The harness stands for the loop thread and the links: it does with a message what `SessionLinks`
does, and reports what a correct link would. What it never does is keep to the protocol.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from kv_transfer.driver import HandoffDriver
from kv_transfer.events import (
    LinkFailed,
    MessageCame,
    PayloadArrived,
    PayloadSent,
    ReceiverBuilt,
    ReceivesPosted,
    SenderBuilt,
    SessionLost,
    SessionOpened,
)
from kv_transfer.protocol import messages as m
from kv_transfer.protocol.key import HandoffKey
from kv_transfer.protocol.states import SinkState, SourceState
from kvferry.clock import ManualClock
from kvferry.config import HandoffConfig
from kvferry.errors import ErrorKind, InvalidInput
from kvferry.generation import OutputToken, PrefillSource
from kvferry.ids import Attempt, Incarnation, RequestId, WorkerId
from kvferry.sampling import SamplingParams
from mem_cache.errors import OutOfRows, OutOfSlots
from tests.support.handoff_pair import (
    NO_KEY,
    PLAIN_USE,
    RecordingSink,
    RecordingSource,
    prompt_of,
    small_cache,
    small_layout,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.protocol.messages import SessionMessage

OURS, THEIRS = Incarnation(101), Incarnation(202)
BUFFERS = 3
VOCABULARY = 1000
PROMPT_MAX = 40
NUMBERS = [0, 1, 2, 3, 4, 8, 16, 20, 24, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


class FakeLink:
    """Either end of a link; it only remembers what it is asked."""

    def __init__(self, on_send: Callable[[int], None], on_recycle: Callable[[], None]) -> None:
        self._on_send = on_send
        self._on_recycle = on_recycle

    def send(self, seq: int, payload: torch.Tensor) -> None:
        self._on_send(seq)

    def expect(self, seq: int, payload_bytes: int) -> None:
        raise AssertionError("the loop thread does this")

    def recycle(self, buffer: int) -> None:
        self._on_recycle()

    def close(self, reason: str) -> None:
        raise AssertionError("the loop thread does this")


class FakeSession:
    """A session and its links, as the engine thread sees them."""

    def __init__(self, is_source: bool, post: Callable[[object], None], buffer_bytes: int) -> None:
        self.is_source = is_source
        self.sent: list[SessionMessage] = []
        self.closed: str | None = None
        self.generation = 0
        self.next_seq = 0
        self._post = post
        self._receives = 0
        self._buffer_bytes = buffer_bytes
        self._is_link_up = False

    # --- what the engine thread calls ---

    def send(self, message: SessionMessage) -> None:
        self.sent.append(message)

    def close(self, reason: str) -> None:
        self.closed = self.closed or reason

    def open_link(self, generation: int) -> None:
        assert generation > self.generation
        self._begin(generation)
        self._post(SenderBuilt(self, generation, self._new_link(generation)))

    def close_link(self, generation: int, reason: str) -> None:
        if generation == self.generation and self._is_link_up:
            self._fail(reason)

    # --- what the loop thread does with a message ---

    def on_message(self, message: SessionMessage) -> None:
        match message:
            case m.LinkRendezvous(generation, _, _) if not self.is_source:
                if generation > self.generation:
                    self._begin(generation)
                    self._post(ReceiverBuilt(self, generation, self._new_link(generation)))
                    self._post_receives(BUFFERS)
            case m.Chunk() if message.link_generation == self.generation and self._is_link_up:
                self._receive(message)
            case m.LinkDown(generation, reason):
                self.close_link(generation, reason)
            case _:
                pass

    def _begin(self, generation: int) -> None:
        self.generation, self.next_seq, self._receives = generation, 0, 0
        self._is_link_up = True

    def _new_link(self, generation: int) -> FakeLink:
        return FakeLink(
            lambda seq: self._post(PayloadSent(self, generation, seq)),
            lambda: self._post_receives(1) if generation == self.generation else None,
        )

    def _post_receives(self, buffers: int) -> None:
        self._receives += buffers
        self._post(ReceivesPosted(self, self.generation, buffers))

    def _receive(self, chunk: m.Chunk) -> None:
        if self.is_source or chunk.link_seq < self.next_seq:
            return
        if chunk.link_seq > self.next_seq or self._receives == 0:
            self._fail("a header out of place")
            return
        self.next_seq += 1
        self._receives -= 1
        # A peer may announce what it likes; more than a buffer never comes.
        payload = torch.zeros(min(chunk.payload_bytes, self._buffer_bytes), dtype=torch.uint8)
        self._post(PayloadArrived(self, self.generation, chunk.link_seq, 0, payload))

    def _fail(self, reason: str) -> None:
        self._is_link_up = False
        self._post(LinkFailed(self, self.generation, reason))


class FuzzSink(RecordingSink):
    """Refuses tokens that its model does not have."""

    def first_token(self, key, token) -> None:
        if not 0 <= token.token_id < VOCABULARY:
            raise InvalidInput("token", "is not one of the model's")
        super().first_token(key, token)


class FuzzSource(RecordingSource):
    """Refuses prompts that are too long, and schedules when there is room."""

    def start(self, key, prompt, sampling, cache_use) -> None:
        if len(prompt) > PROMPT_MAX:
            raise InvalidInput("prompt", "is too long")
        super().start(key, prompt, sampling, cache_use)

    def try_schedule(self, key) -> None:
        prompt = self.prompts[key]
        cache = self._worker.kv_cache
        try:
            kv = cache.open(str(key), prompt, NO_KEY)
        except OutOfRows:
            return
        try:
            cache.extend(kv, len(prompt))
        except OutOfSlots:
            cache.release(kv, None)
            return
        del self.queue[key]
        self.kvs[key] = kv
        self._worker.driver.scheduled(key, kv, kv.prefix_len)


class FuzzWorker:
    """A driver, its hosts and pools; `moves` throws, `finish` loses every session."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        layout = small_layout()
        self.layout = layout
        self.buffer_bytes = 8 * layout.bytes_per_token
        self.kv_cache = small_cache(layout, num_slots=256)
        self.source, self.sink = FuzzSource(self), FuzzSink(self)
        self.events: deque[object] = deque()
        self.sessions: list[FakeSession] = []
        self.fetched: list[HandoffKey] = []
        self.asked: list[HandoffKey] = []
        self.names = 0
        self.driver = HandoffDriver(
            worker_id=WorkerId("ours"),
            incarnation=OURS,
            kv_cache=self.kv_cache,
            config=HandoffConfig(staging_buffer_bytes=self.buffer_bytes, staging_buffers=BUFFERS),
            clock=self.clock,
            post=self.events.append,
            loop=asyncio.new_event_loop(),
            source_host=self.source,
            sink_host=self.sink,
        )
        self.driver._hub._loop.close()
        self.driver._sink._hub = self

    def connect(self, source: PrefillSource) -> FakeSession:
        """The driver's session hub is this harness."""
        session = FakeSession(False, self.events.append, self.buffer_bytes)
        self.sessions.append(session)
        return session

    def call(self) -> None:
        """A sink calls us."""
        session = FakeSession(True, self.events.append, self.buffer_bytes)
        self.sessions.append(session)
        buffer_bytes = self.rng.choice([0, self.layout.bytes_per_token, 2**40, 2**64 - 1])
        hello = m.Hello(WorkerId("theirs"), THEIRS, self.layout.exchange_hash(), buffer_bytes)
        self.events.append(SessionOpened(session, hello))

    def new_key(self, source: Incarnation, sink: Incarnation) -> HandoffKey:
        self.names += 1
        return HandoffKey(RequestId(f"r{self.names}"), Attempt(1), source, sink)

    def fetch(self) -> None:
        key = self.new_key(THEIRS, OURS)
        prompt = prompt_of(self.rng.randint(1, PROMPT_MAX), self.names)
        self.sink.prompts[key] = prompt
        source = PrefillSource(WorkerId("theirs"), "nowhere", THEIRS)
        self.driver.fetch(key, source, prompt, SamplingParams(), PLAIN_USE)
        self.fetched.append(key)

    # --- moves of the hosts, of time, of the other threads ---

    def host_moves(self) -> None:
        source, sink = self.source, self.sink
        for key in list(source.queue):
            if self.rng.random() < 0.5:
                source.try_schedule(key)
        for key, kv in list(source.kvs.items()):
            if self.rng.random() < 0.3:
                self._compute(key, kv.committed_len)
        for key in list(self.fetched):
            if key in sink.adopted_usage and key in sink.kvs:
                sink.release(key)
            elif self.rng.random() < 0.02 and key in self.driver._sink._handoffs:
                sink.abort(key, "enough")

    def _compute(self, key: HandoffKey, committed: int) -> None:
        prompt_tokens = len(self.source.prompts[key])
        if committed < prompt_tokens:
            self.source.compute(key, self.rng.randint(committed + 1, prompt_tokens))
            return
        core = self.driver._source._handoffs[key].core
        if core._first_token is None and core.state is not SourceState.COMPLETED:
            self.source.finish(key)

    def advance(self) -> None:
        self.clock.advance(self.rng.choice([0.01, 0.1, 0.6, 5.0]))
        self.driver.tick()

    def handle_events(self, most: int) -> None:
        for _ in range(most):
            if not self.events:
                return
            assert self.driver.handle(self.events.popleft())

    def lose(self, session: FakeSession) -> None:
        self.sessions.remove(session)
        self.events.append(SessionLost(session, session.closed or "fault"))

    # --- messages ---

    def say(self, session: FakeSession, message: SessionMessage) -> None:
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            self.events.append(MessageCame(session, message))
            # What a link reports about a message comes after it.
            session.on_message(message)

    def anything(self, session: FakeSession) -> SessionMessage:
        """A message of a random kind with random content, mostly one that may come that way."""
        rng = self.rng
        key, n = self._some_key(), self._number
        prompt = np.asarray([n() % 2**31 for _ in range(rng.choice([0, 1, 9, 60]))], np.int32)
        to_source = [
            lambda: m.Prefill(key, prompt, SamplingParams(), PLAIN_USE, self._layout_hash()),
            lambda: m.Grant(key, n()),
            lambda: m.Busy(key),
            lambda: m.Received(key),
            lambda: m.Credit(n(), n()),
        ]
        to_sink = [
            lambda: m.Ready(key, n(), self._layout_hash(), n()),
            lambda: m.Chunk(key, n(), n(), n(), n(), n(), n(), n(), n()),
            lambda: m.Chunk(key, session.generation, session.next_seq, 0, n(), 0, 3, n(), 0),
            lambda: m.FirstToken(key, OutputToken(n())),
            lambda: m.Complete(key, n(), n()),
            lambda: m.Closed(key),
        ]
        either = [
            lambda: m.Abort(key, "because", rng.choice([None, *ErrorKind])),
            lambda: m.Aborted(key),
            lambda: m.LinkDown(n(), "because"),
            lambda: m.LinkRendezvous(max(n(), rng.random() < 0.9), "begin", b""),
        ]
        fitting = to_source if session.is_source else to_sink
        if rng.random() < 0.95:
            return rng.choice([*fitting, *either])()
        hello = m.Hello(WorkerId("x"), Incarnation(n()), "layout", n())
        return rng.choice([lambda: hello, *to_source, *to_sink])()

    def _number(self) -> int:
        return self.rng.choice(NUMBERS)

    def _layout_hash(self) -> str:
        return self.rng.choice([self.layout.exchange_hash(), "other"])

    def _some_key(self) -> HandoffKey:
        known = [*self.fetched[-4:], *self.asked[-4:]]
        if known and self.rng.random() < 0.8:
            return self.rng.choice(known)
        return HandoffKey(RequestId("?"), Attempt(2**32 - 1), Incarnation(self._number()), OURS)

    def likely_of_source(self, session: FakeSession) -> SessionMessage:
        """What a correct source might say next, about a handoff of that session."""
        generation = max(1, session.generation)
        open_ = [
            (k, h) for k, h in self.driver._sink._handoffs.items() if h.peer.session is session
        ]
        if not open_ or self.rng.random() < 0.1:
            return m.LinkRendezvous(self.rng.choice([1, generation, generation + 1]), "begin", b"")
        key, handoff = self.rng.choice(open_)
        core = handoff.core
        if core.state in (SinkState.REQUESTED, SinkState.WAITING):
            return m.Ready(key, core.prompt_tokens, self.layout.exchange_hash(), 0)
        if core.announced_tokens < core.prompt_tokens:
            start = core.announced_tokens
            stop = min(core.prompt_tokens, start + self.rng.randint(1, 9))
            size = (stop - start) * self.layout.bytes_per_token
            layers = self.layout.num_layers
            return m.Chunk(key, generation, session.next_seq, start, stop, 0, layers, size, 0)
        if core.first_token_at is None:
            return m.FirstToken(key, OutputToken(self.rng.choice([*[7] * 15, VOCABULARY])))
        return m.Complete(key, core.prompt_tokens, core.chunks_announced)

    def likely_of_sink(self, session: FakeSession) -> SessionMessage:
        """What a correct sink might say next."""
        open_ = [
            (k, h) for k, h in self.driver._source._handoffs.items() if h.peer.session is session
        ]
        if not open_ or self.rng.random() < 0.1:
            key = self.new_key(OURS, THEIRS)
            self.asked.append(key)
            prompt = prompt_of(self.rng.randint(1, PROMPT_MAX), self.names)
            return m.Prefill(key, prompt, SamplingParams(), PLAIN_USE, self.layout.exchange_hash())
        key, handoff = self.rng.choice(open_)
        if handoff.core.state is SourceState.COMPLETED:
            return m.Received(key)
        if handoff.core.state is SourceState.STREAMING or self.rng.random() < 0.2:
            return m.Credit(session.generation, self.rng.randint(1, 3))
        return m.Grant(key, 4 * self.rng.randint(0, handoff.core.prompt_tokens // 4))

    # --- the run ---

    def run(self, moves: int, wildness: float) -> None:
        for _ in range(moves):
            self._move(wildness)
        for session in list(self.sessions):
            self.lose(session)
        self.handle_events(10**9)
        self.host_moves()

    def _move(self, wildness: float) -> None:
        sources = sum(session.is_source for session in self.sessions)
        dice = self.rng.random()
        if not self.sessions:
            self.handle_events(10**9)
            self.fetch()
            self.call()
        elif dice < 0.05:
            self.fetch()
        elif dice < 0.07 and sources < 2:
            self.call()
        elif dice < 0.25:
            self.host_moves()
        elif dice < 0.3:
            self.advance()
        elif dice < 0.305:
            self.lose(self.rng.choice(self.sessions))
        elif dice < 0.55:
            self.handle_events(self.rng.randint(1, 20))
        else:
            self._throw(self.rng.choice(self.sessions), wildness)
        for session in [session for session in self.sessions if session.closed]:
            self.lose(session)

    def _throw(self, session: FakeSession, wildness: float) -> None:
        if self.rng.random() < wildness:
            self.say(session, self.anything(session))
            return
        # A likely message is made of the present state: let the engine come up to it.
        self.handle_events(10**9)
        likely = self.likely_of_sink if session.is_source else self.likely_of_source
        self.say(session, likely(session))
