"""The simulated world: workers, what is under way between them, and every move there is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.events import MessageCame
from kv_transfer.protocol.key import HandoffKey
from kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Busy,
    Grant,
    LinkDown,
    LinkRendezvous,
    LinkSignal,
    Prefill,
    Received,
)
from kv_transfer.protocol.states import SourceState
from kvferry.cache_key import CacheUse
from kvferry.clock import ManualClock
from kvferry.generation import OutputToken
from kvferry.ids import Attempt, ExtraKey, RequestId
from kvferry.sampling import SamplingParams
from tests.support.sim_pool import content_of
from tests.support.sim_properties import (
    Properties,
    fingerprint,
    p8_nothing_old_changes_anything,
)
from tests.support.sim_violation import require
from tests.support.sim_worker import SimWorker

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from kv_transfer.protocol.messages import SessionMessage
    from kvferry.ids import TokenIds
    from tests.support.sim_session import Pair, SimSession

_PLAIN = CacheUse(ExtraKey(""))
_REMEMBERED = 60


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The shape of one worker."""

    name: str = ""
    """By its number if empty."""
    page_size: int = 2
    slots: int = 32
    rows: int = 4
    ranks: int = 1
    buffer_tokens: int = 2
    """Tokens that a staging buffer holds."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The shape of a world."""

    workers: tuple[WorkerSetup, ...] = (WorkerSetup(), WorkerSetup())
    heads: int = 1
    """KV heads, on all ranks together."""
    buffers: int = 2
    checksums: bool = False
    links_max: int = 64
    sent_early: bool = False
    """Whether a payload is reported as sent before it arrives."""
    preempts: float = 0.0
    """How often an engine acts in the midst of a move of a link."""
    chances: Mapping[str, float] = frozenset()  # type: ignore[assignment]  # set by those who use it


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a client wants, over all attempts."""

    name: str
    prompt: TokenIds
    content: np.ndarray
    """Its KV: float32 [layers, planes, T, heads, D]."""
    tokens: tuple[OutputToken, ...]
    held_only: bool = False


class SimWorld:
    """Nothing moves here but by a call. All randomness is `rng`'s."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup = setup
        self.rng = rng
        self.clock = ManualClock()
        self.properties = Properties(self)
        self.requests: dict[HandoffKey, Request] = {}
        self.pairs: list[Pair] = []
        self.has_faults = False
        """Whether anything but the normal course has been done to it."""
        self.is_anything_wild = False
        """Whether somebody has said what no correct peer says."""
        self.is_lying = False
        """Whether peers say things that are not so."""
        self.chances = dict(setup.chances or {})
        self.log: list[str] | None = None
        self._numbers = itertools.count(1)
        self._incarnations = itertools.count(101)
        self._said: list[SessionMessage] = []
        self._attempts: dict[str, int] = {}
        self.by_incarnation: dict[int, SimWorker] = {}
        self.workers = [
            self._new_worker(shape.name or f"w{index}", shape)
            for index, shape in enumerate(setup.workers)
        ]

    @property
    def living(self) -> list[SimWorker]:
        """Workers that are alive, frozen or not."""
        return [worker for worker in self.workers if worker.is_alive]

    # --- what the parts ask ---

    def next_number(self) -> int:
        """Never the same twice."""
        return next(self._numbers)

    def chance(self, name: str) -> bool:
        """Whether it happens this time."""
        often = self.chances.get(name)
        if not often or self.rng.random() >= often:
            return False
        self.has_faults = True
        return True

    def some_of(self, length: int) -> int:
        """How much of something survives a break."""
        return self.rng.randint(0, length)

    def preempt(self, worker: SimWorker) -> None:
        """The engine of a worker gets the processor while a link's thread is at work."""
        rng = self.rng
        if not self.setup.preempts or rng.random() >= self.setup.preempts:
            return
        for _ in range(rng.randint(1, 3)):
            if not worker.can_move:
                return
            if rng.random() < 0.3 and worker.step is None:
                self.abort_something(worker)
            elif worker.step is not None or worker.inbox:
                worker.engine_move()
            elif rng.random() < 0.5:
                self.fill(worker)

    def remember(self, message: SessionMessage) -> None:
        """It may be said again, later and elsewhere."""
        if len(self._said) >= _REMEMBERED:
            self._said[self.rng.randrange(_REMEMBERED)] = message
        else:
            self._said.append(message)

    @property
    def said(self) -> list[SessionMessage]:
        """Some of what was said so far."""
        return self._said

    def say(self, line: str) -> None:
        """For transcripts."""
        if self.log is not None:
            self.log.append(line)

    def lanes_between(self, key: HandoffKey) -> int:
        """Lanes of the link of a handoff."""
        source = self.by_incarnation[key.source_incarnation]
        sink = self.by_incarnation[key.sink_incarnation]
        return max(len(source.pools), len(sink.pools))

    # --- requests ---

    def has_asked_for(self, key: HandoffKey) -> bool:
        """Whether a client wants it: what workers move of their own accord is not tried again."""
        return key.request_id in self._attempts

    def fetch(self, request: Request, source: SimWorker, sink: SimWorker) -> HandoffKey:
        """One more attempt of a request."""
        attempt = self._attempts[request.name] = self._attempts.get(request.name, 0) + 1
        key = HandoffKey(
            RequestId(request.name), Attempt(attempt), source.incarnation, sink.incarnation
        )
        self.requests[key] = request
        sink.sink.prompts[key] = request.prompt
        sampling = SamplingParams(n=max(1, len(request.tokens)))
        sink.driver.fetch(
            key,
            source.as_source(),
            request.prompt,
            sampling,
            _PLAIN,
            held_only=request.held_only,
        )
        return key

    def new_request(
        self, prompt: TokenIds, samples: int = 1, *, held_only: bool = False, name: str = ""
    ) -> Request:
        """With first tokens of its own."""
        number = self.next_number()
        tokens = tuple(OutputToken(number * 8 + sample) for sample in range(samples))
        content = content_of(prompt, self.setup.heads)
        return Request(
            name or f"r{number}", prompt, content, () if held_only else tokens, held_only
        )

    def know(self, key: HandoffKey, prompt: TokenIds, samples: int) -> None:
        """Somebody asks for this; if no client did, it is made up now."""
        if key not in self.requests:
            assert self.is_lying, f"nobody asked for {key}"
            held_only = samples == 0
            self.requests[key] = self.new_request(prompt, max(1, samples), held_only=held_only)

    # --- moves of one worker ---

    def fill(self, worker: SimWorker) -> None:
        """Another request takes what is free."""
        prompt = np.asarray(
            [self.rng.randint(1, 3) for _ in range(self.rng.randint(1, 8))], np.int32
        )
        worker.fillers.open(f"filler {self.next_number()}", prompt)

    def abort_something(self, worker: SimWorker) -> bool:
        """A host gives up one of its handoffs, whatever its state; False if it has none."""
        source = list(worker.driver._source._handoffs)
        sink = list(worker.driver._sink._handoffs)
        if not source and not sink:
            return False
        self.has_faults = True
        choice = self.rng.randrange(len(source) + len(sink))
        if choice < len(source):
            worker.source.abort(source[choice])
        else:
            worker.sink.abort(sink[choice - len(source)])
        return True

    def say_stale(self, end: SimSession) -> None:
        """Something of an old incarnation, attempt or generation reaches an engine."""
        worker = end.worker
        if worker.step is not None or not self._said:
            return
        message = self.rng.choice(self._said)
        if not is_stale(end, message):
            return
        self.is_anything_wild = True
        before = fingerprint(worker)
        if isinstance(message, LinkRendezvous | LinkSignal | LinkDown):
            end.links.on_message(message)
        worker.driver.handle(MessageCame(end, message))
        p8_nothing_old_changes_anything(worker, before, message)

    def forge(self, end: SimSession) -> None:
        """A sink says that it has everything before it can have."""
        peer = end.worker.driver._source._peers.get(end)
        early = (SourceState.QUEUED, SourceState.OFFERED, SourceState.STREAMING)
        keys = [
            key
            for key, handoff in end.worker.driver._source._handoffs.items()
            if handoff.peer is peer and handoff.core.state in early
        ]
        if keys and end.worker.step is None:
            self.has_faults = self.is_anything_wild = True
            end.worker.driver.handle(MessageCame(end, Received(self.rng.choice(keys))))

    # --- time and processes ---

    def advance(self, seconds: float) -> None:
        """Let time pass; every engine that runs looks at the clock."""
        self.clock.advance(seconds)
        for worker in self.living:
            if worker.can_move and worker.step is None:
                worker.driver.tick()
        self.properties.after_tick()

    def next_deadline(self) -> float | None:
        """When the next thing is due at a worker that runs."""
        times = [worker.driver.next_deadline() for worker in self.living if worker.can_move]
        return min((time for time in times if time is not None), default=None)

    def advance_to_next(self) -> None:
        """Let time pass until something is due."""
        due = self.next_deadline()
        require(due is not None, "P6: a handoff is open and nothing is due")
        assert due is not None
        self.advance(max(0.0, due - self.clock.now()))

    def crash(self, worker: SimWorker) -> None:
        """SIGKILL."""
        self.has_faults = True
        worker.die()

    def restart(self, worker: SimWorker) -> SimWorker:
        """A new process under the old name."""
        fresh = self._new_worker(worker.name, worker.setup)
        self.workers[self.workers.index(worker)] = fresh
        return fresh

    def at(self, name: str) -> SimWorker | None:
        """The process that listens at an address."""
        for worker in self.workers:
            if worker.name == name and worker.is_alive:
                return worker
        return None

    def _new_worker(self, name: str, setup: WorkerSetup) -> SimWorker:
        worker = SimWorker(self, name, next(self._incarnations), setup)
        self.by_incarnation[worker.incarnation] = worker
        return worker


def is_stale(end: SimSession, message: SessionMessage) -> bool:
    """Whether a correct peer could have sent it once, and it means nothing here any more."""
    driver = end.worker.driver
    match message:
        case LinkRendezvous() | LinkSignal() | LinkDown():
            # Old is what both the loop and the engine have left behind: news of the next
            # generation may still wait in the engine's inbox.
            known = min(end.links._generation, _engines_generation(end))
            return 0 < message.link_generation < known
        case Prefill():
            handoffs = driver._source._handoffs
            ours = message.key.source_incarnation == end.worker.incarnation
            known = message.key in driver._source._tombstones
            return end.is_source and message.key not in handoffs and (known or not ours)
        case Abort() | Aborted():
            side = driver._source if end.is_source else driver._sink
        case Grant() | Busy() | Received():
            if not end.is_source:
                return False
            side = driver._source
        case _:
            if end.is_source:
                return False
            side = driver._sink
    live = side._handoffs.get(message.key)
    return live is None or live.peer.session is not end


def _engines_generation(end: SimSession) -> int:
    """The link generation that the engine has in mind; 0 before the first."""
    driver = end.worker.driver
    if end.is_source:
        sink = driver._source._peers.get(end)
        return 0 if sink is None else sink.generation
    source = driver._sink._peers.get(end)
    return 0 if source is None or source.link is None else source.link.generation
