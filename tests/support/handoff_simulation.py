"""A source and a sink core joined by a simulated session and link, driven by a seed.

The harness performs the cores' effects on a toy memory: slots are just a set of token positions.
It checks after each step what must hold at every moment, and at the end what must hold then.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_transfer.protocol.deadlines import build_deadlines
from kv_transfer.protocol.effects import (
    Commit,
    DeliverFirstToken,
    NotifyAdopted,
    NotifyCancelled,
    NotifyClosed,
    NotifyFailed,
    Pin,
    Reserve,
    Send,
    SendPayload,
    Unpin,
    WantCredit,
)
from kv_transfer.protocol.errors import BadMessage, IllegalEvent
from kv_transfer.protocol.key import HandoffKey
from kv_transfer.protocol.messages import Aborted, Chunk, Closed
from kv_transfer.protocol.sink import SinkCore
from kv_transfer.protocol.source import SourceCore
from kv_transfer.protocol.states import SINK_TERMINAL, SOURCE_TERMINAL, SinkState, SourceState
from kvferry.generation import OutputToken
from kvferry.ids import Attempt, Incarnation, RequestId

if TYPE_CHECKING:
    from kv_transfer.protocol.effects import Effect, Effects

DEADLINES = build_deadlines(20.0)
PAGE = 4
BUFFERS = 2
LAYOUT = "layout"


@dataclass(slots=True)
class SourceHalf:
    """The toy worker that computes."""

    core: SourceCore
    pinned: bool = False
    released: bool = False
    wants_credit: bool = False
    ends: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SinkHalf:
    """The toy worker that decodes."""

    core: SinkCore
    reserved: bool = False
    filled: set[int] = field(default_factory=set)
    readable: bool = False
    first_tokens: int = 0
    ends: list[str] = field(default_factory=list)


_MOVES_OF = {
    "source": ("deliver_to_source", "schedule", "compute", "finish", "pump"),
    "sink": ("deliver_to_sink", "arrive"),
}


class Simulation:
    """One handoff with faults. `run` drives it to its end; checks raise `AssertionError`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.prompt_tokens = self.rng.choice([1, PAGE - 1, PAGE, PAGE + 1, 23])
        pages = self.rng.randint(0, self.prompt_tokens // PAGE)
        self.resume_at = pages * PAGE
        key = HandoffKey(RequestId("r"), Attempt(1), Incarnation(1), Incarnation(2))
        sink = SinkCore(key, self.prompt_tokens, LAYOUT, DEADLINES, 0.0)
        source = SourceCore(key, self.prompt_tokens, LAYOUT, PAGE, DEADLINES, 0.0)
        self.sink, self.source = SinkHalf(sink), SourceHalf(source)
        self.key = key
        self.to_sink: deque[object] = deque()
        self.to_source: deque[object] = deque()
        self.payloads: deque[tuple[int, int]] = deque()
        self.headers: deque[tuple[int, int]] = deque()
        self.credits = BUFFERS
        self.seq = 0
        self.session_up = self.link_up = True
        self.refusals = self.rng.choice([0, 0, 1, 3, 10**6])
        self.is_faulty = self.rng.random() < 0.7
        # Faults stop at some point; whatever is open then has to end by itself.
        self.faults_left = self.rng.randint(1, 3) if self.is_faulty else 0
        self.frozen: str | None = None
        """The side whose engine has stopped without its session breaking, if any."""
        self.late = 0
        self.trace: list[str] = []

    # --- performing effects ---

    def at_source(self, effects: Effects) -> None:
        half = self.source
        if half.core.state in SOURCE_TERMINAL and not half.ends and not half.released:
            self.trace.append(f"source {half.core.state.value}")
        for effect in effects:
            self._source_effect(half, effect)
        if half.core.state in SOURCE_TERMINAL:
            assert not half.pinned, "the pin outlived the handoff"
            half.released = True

    def _source_effect(self, half: SourceHalf, effect: Effect) -> None:
        match effect:
            case Send(message):
                if self.session_up:
                    self.to_sink.append(message)
            case Pin():
                assert not half.pinned
                half.pinned = True
            case Unpin():
                assert half.pinned
                half.pinned = False
            case WantCredit():
                half.wants_credit = True
            case SendPayload(start, stop):
                assert half.pinned, "slots are read without a pin"
                assert stop <= half.core.computed_tokens, "KV is sent before it is computed"
                self._send_payload(start, stop)
            case NotifyClosed():
                half.ends.append("closed")
            case NotifyCancelled():
                half.ends.append("cancelled")
            case _:
                raise AssertionError(effect)

    def _send_payload(self, start: int, stop: int) -> None:
        assert self.credits > 0, "a payload without credit"
        self.credits -= 1
        if self.session_up:
            chunk = Chunk(self.key, 1, self.seq, start, stop, 0, 1, stop - start, 0)
            self.to_sink.append(chunk)
            self.payloads.append((start, stop))
        self.seq += 1

    def at_sink(self, effects: Effects) -> None:
        for effect in effects:
            self._sink_effect(self.sink, effect)
        if self.sink.core.state is SinkState.ABORTED:
            self.sink.reserved = False

    def _sink_effect(self, half: SinkHalf, effect: Effect) -> None:
        match effect:
            case Send(message):
                if self.session_up:
                    self.to_source.append(message)
            case Reserve():
                self._reserve(half)
            case DeliverFirstToken():
                half.first_tokens += 1
                assert half.first_tokens == 1
            case Commit(tokens):
                assert half.reserved
                assert half.filled == set(range(self.resume_at, tokens)), "commit with a gap"
                half.readable = True
            case NotifyAdopted():
                assert half.readable, "adopted before the commit"
                assert half.first_tokens == 1
                half.ends.append("adopted")
            case NotifyFailed():
                half.ends.append("failed")
            case _:
                raise AssertionError(effect)

    def _reserve(self, half: SinkHalf) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            self.at_sink(half.core.refused(self.now))
            return
        assert not half.reserved
        half.reserved = True
        self.at_sink(half.core.reserved(self.resume_at, self.now))

    # --- moves ---

    def deliver_to_sink(self) -> None:
        message = self.to_sink.popleft()
        again = self._doubles(message)
        for _ in range(1 + again):
            self._sink_hears(message)

    def _sink_hears(self, message: object) -> None:
        core = self.sink.core
        if isinstance(message, Chunk):
            if message.link_seq < self._announced:
                return
            self._announced += 1
            self.headers.append((message.token_start, message.token_stop))
        if core.state in SINK_TERMINAL or isinstance(message, Aborted | Closed):
            self.late += 1
            return
        try:
            self.at_sink(core.on_message(message, self.now))
        except (IllegalEvent, BadMessage) as error:
            raise AssertionError(f"a correct source was misunderstood: {error}") from error

    _announced = 0

    def deliver_to_source(self) -> None:
        message = self.to_source.popleft()
        for _ in range(1 + self._doubles(message)):
            core = self.source.core
            if core.state in SOURCE_TERMINAL or isinstance(message, Aborted):
                self.late += 1
                continue
            try:
                self.at_source(core.on_message(message, self.now))
            except (IllegalEvent, BadMessage) as error:
                raise AssertionError(f"a correct sink was misunderstood: {error}") from error

    def _doubles(self, message: object) -> bool:
        # A doubled Complete or Abort finds the handoff ended; the others find it going on.
        return self.is_faulty and self.rng.random() < 0.2

    def arrive(self) -> None:
        """The oldest announced payload is in the ring: scatter it or drop it."""
        start, stop = self.payloads.popleft()
        assert self.headers.popleft() == (start, stop), "payload and header differ"
        half = self.sink
        if half.core.takes_payload:
            assert half.reserved, "a scatter into slots that are not reserved"
            half.filled |= set(range(start, stop))
            self.at_sink(half.core.scattered(self.now))
        self.credits += 1

    def schedule(self) -> None:
        self.at_source(self.source.core.scheduled(0, self.now))

    def compute(self) -> None:
        core = self.source.core
        tokens = self.rng.randint(core.computed_tokens + 1, self.prompt_tokens)
        self.at_source(core.computed(tokens, self.now))

    _finished = False

    def finish(self) -> None:
        self._finished = True
        self.at_source(self.source.core.finished(OutputToken(1), self.now))

    def pump(self) -> None:
        self.source.wants_credit = False
        if self.source.core.sendable_tokens:
            tokens_max = self.rng.randint(1, 8)
            self.at_source(self.source.core.take_chunk(tokens_max, 1, self.now))

    def tick(self) -> None:
        """Let time pass to the next deadline, or a bit."""
        halves = {"source": self.source, "sink": self.sink}
        times = [half.core.wakes_at for side, half in halves.items() if side != self.frozen]
        due = min((time for time in times if time is not None), default=self.now)
        self.now = max(self.now, due if self.rng.random() < 0.5 else self.now + 0.1)
        if self.frozen != "source" and self.source.core.state not in SOURCE_TERMINAL:
            self.at_source(self.source.core.on_time(self.now))
        if self.frozen != "sink":
            self.at_sink(self.sink.core.on_time(self.now))

    # --- faults ---

    def lose_session(self) -> None:
        self.session_up = self.link_up = False
        self.to_sink.clear()
        self.to_source.clear()
        self.payloads.clear()
        self.headers.clear()
        if self.source.core.state not in SOURCE_TERMINAL:
            self.at_source(self.source.core.session_lost("fault", self.now))
        if self.sink.core.state not in SINK_TERMINAL:
            self.at_sink(self.sink.core.session_lost("fault", self.now))
        assert self.source.core.state in SOURCE_TERMINAL, "outlived its session"
        assert self.sink.core.state in SINK_TERMINAL, "outlived its session"

    def freeze(self) -> None:
        self.frozen = self.rng.choice(["source", "sink"])

    def lose_link(self) -> None:
        self.link_up = False
        self.payloads.clear()
        source, sink = self.source.core, self.sink.core
        if source.link_generation is not None and source.state not in SOURCE_TERMINAL:
            self.at_source(source.link_lost("fault", self.now))
        if sink.link_generation is not None and sink.state not in SINK_TERMINAL:
            self.at_sink(sink.link_lost("fault", self.now))

    def abort_source(self) -> None:
        self.source.ends.append("own abort")
        self.at_source(self.source.core.abort("fault", self.now))

    def abort_sink(self) -> None:
        self.sink.ends.append("own abort")
        self.at_sink(self.sink.core.abort("fault", self.now))

    # --- the run ---

    def moves(self) -> list[str]:
        core = self.source.core
        live = core.state not in SOURCE_TERMINAL
        scheduled = live and core.state is not SourceState.QUEUED
        possible = {
            "deliver_to_sink": bool(self.to_sink),
            "deliver_to_source": bool(self.to_source),
            "arrive": bool(self.payloads and self.headers and self.link_up),
            "schedule": core.state is SourceState.QUEUED,
            "compute": scheduled
            and not self._finished
            and core.computed_tokens < self.prompt_tokens,
            "finish": scheduled
            and not self._finished
            and core.computed_tokens == self.prompt_tokens,
            "pump": live and self.source.wants_credit and self.credits > 0 and self.link_up,
        }
        still = _MOVES_OF.get(self.frozen or "", ())
        return [name for name, is_possible in possible.items() if is_possible and name not in still]

    def faults(self) -> list[str]:
        possible = {
            "lose_session": self.session_up and self.frozen is None,
            "lose_link": self.link_up and self.seq > 0 and self.frozen is None,
            "abort_source": self.source.core.state not in SOURCE_TERMINAL
            and self.frozen != "source",
            "abort_sink": self.sink.core.state not in SINK_TERMINAL and self.frozen != "sink",
            "freeze": self.frozen is None and self.rng.random() < 0.3,
            "tick": True,
        }
        return [name for name, is_possible in possible.items() if is_possible]

    @property
    def is_over(self) -> bool:
        source = self.frozen == "source" or self.source.core.state in SOURCE_TERMINAL
        sink = self.frozen == "sink" or self.sink.core.state in SINK_TERMINAL
        return source and sink and not self.moves()

    def run(self, steps_max: int = 2000) -> None:
        for _ in range(steps_max):
            if self.is_over:
                break
            fault = self.faults_left > 0 and self.rng.random() < 0.05
            self.faults_left -= fault
            choices = self.faults() if fault else self.moves() or ["tick"]
            move = self.rng.choice(choices)
            self.trace.append(move)
            getattr(self, move)()
            self.check_step()
        self.check_end()

    def check_step(self) -> None:
        assert 0 <= self.credits <= BUFFERS
        assert not (self.sink.readable and self.sink.core.state is not SinkState.ADOPTED)
        assert self.source.pinned or self.source.core.state in (
            *SOURCE_TERMINAL,
            SourceState.QUEUED,
        )

    def check_end(self) -> None:
        if self.frozen != "source":
            assert self.source.core.state in SOURCE_TERMINAL, "the source has not ended"
            assert len(self.source.ends) == 1, self.source.ends
            assert not self.source.pinned
        if self.frozen != "sink":
            assert self.sink.core.state in SINK_TERMINAL, "the sink has not ended"
            assert len(self.sink.ends) == 1, self.sink.ends
            assert self.sink.reserved == (self.sink.core.state is SinkState.ADOPTED)
        if self.frozen is None:
            self._check_agreement()

    def _check_agreement(self) -> None:
        if self.sink.core.state is SinkState.ADOPTED:
            assert self.sink.filled == set(range(self.resume_at, self.prompt_tokens))
        elif self.source.core.state is SourceState.CLOSED:
            # Only a lost session closes a source whose sink did not adopt.
            assert not self.session_up
        if not self.is_faulty and self.refusals < 10**5:
            assert self.sink.ends == ["adopted"]
            assert self.source.ends == ["closed"]
