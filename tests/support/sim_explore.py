"""Every interleaving of a small world, up to a depth: two handoffs over one link.

A move here is one that somebody outside can tell apart: a message is delivered, a payload is
gathered or arrives, a host makes progress, time passes, something breaks. After each the threads
that only react (loop, engine, the building and ending of link ends) come to rest, in one order.
Each path may have so many faults; states that were seen before are not gone on from. From every
new state the world is brought to rest, so that every end is looked at as well.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.protocol.messages import Prefill
from tests.support.sim_moves import Move, deliver
from tests.support.sim_properties import fingerprint
from tests.support.sim_rest import come_to_rest, drain
from tests.support.sim_world import Setup, SimWorld, WorkerSetup

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from kv_transfer.protocol.key import HandoffKey
    from kv_transfer.protocol.messages import SessionMessage
    from tests.support.sim_session import Pair, SimSession
    from tests.support.sim_worker import SimWorker

FAULTS_MAX = 2
"""Faults on one path. Two suffice to have one fault in the course of another's handling."""


@dataclass(frozen=True, slots=True)
class SmallWorld:
    """One configuration."""

    name: str
    lengths: tuple[int, int] = (3, 2)
    """Tokens of the two prompts; the second begins like the first."""
    sink_slots: int = 16
    """With 4 there is room for one of them at a time: the other is told Busy."""
    has_prefix: bool = False
    """The sink has the first prompt's first page already."""


WORLDS = (
    SmallWorld("two handoffs"),
    SmallWorld("one is busy", sink_slots=4),
    SmallWorld("one page is there", lengths=(4, 2), has_prefix=True),
)


class Explorer:
    """Breadth first, each path replayed from the beginning: nothing has to be copied."""

    def __init__(self, small: SmallWorld, depth: int) -> None:
        self._small = small
        self._depth = depth
        self._seen: set[Hashable] = set()
        self.paths = 0
        self.deepest = 0
        self.is_complete = False
        """Whether no state was left to go on from before the depth was reached."""

    @staticmethod
    def worlds(depth: int) -> Iterator[Explorer]:
        """One for each configuration."""
        for small in WORLDS:
            yield Explorer(small, depth)

    def summary(self) -> str:
        """What was looked at."""
        whole = "all there are" if self.is_complete else f"all up to depth {self._depth}"
        return (
            f"{self._small.name}: {len(self._seen)} states ({whole}, at most {FAULTS_MAX} faults"
            f" a path), {self.paths} runs, depth {self.deepest}"
        )

    def run(self) -> str:
        """Explore; empty if every property held, else what broke and the moves that led to it."""
        frontier: deque[tuple[str, ...]] = deque([()])
        self.is_complete = True
        while frontier:
            path = frontier.popleft()
            labels = [move.label for move in moves_of(self._replay(path), path)]
            for label in labels:
                longer = (*path, label)
                try:
                    is_new = self._visit(longer)
                except Exception as error:  # noqa: BLE001  # whatever it is, this path fails
                    return f"{type(error).__name__}: {error}\nmoves: {' | '.join(longer)}"
                if is_new and len(longer) < self._depth:
                    frontier.append(longer)
                elif is_new:
                    self.is_complete = False
        return ""

    def _visit(self, path: Sequence[str]) -> bool:
        world = self._replay(path)
        self.paths += 1
        world.properties.after_move()
        state = (state_of(world), faults_of(path))
        if state in self._seen:
            return False
        self._seen.add(state)
        self.deepest = max(self.deepest, len(path))

        def do(move: Move) -> None:
            move.do()
            world.properties.after_move()

        come_to_rest(world, do)
        return True

    def _replay(self, path: Sequence[str]) -> SimWorld:
        world = new_world(self._small)
        for index, label in enumerate(path):
            moves = moves_of(world, path[:index])
            next(move for move in moves if move.label == label).do()
            settle(world)
        return world


def new_world(small: SmallWorld) -> SimWorld:
    """A source and a sink that have just been asked for two prompts."""
    shapes = (
        WorkerSetup(page_size=2, slots=16, buffer_tokens=2),
        WorkerSetup(page_size=2, slots=small.sink_slots, buffer_tokens=2),
    )
    world = SimWorld(Setup(shapes, buffers=1), random.Random(0))
    # Roles do not cross here, but most paths have faults, and each may end as it likes.
    world.has_faults = True
    source, sink = world.workers
    tokens = np.arange(10, 10 + max(small.lengths), dtype=np.int32)
    if small.has_prefix:
        sink.fillers.open("before", tokens[:2])
        sink.fillers.close(publish=True)
    for length in small.lengths:
        world.fetch(world.new_request(tokens[:length]), source, sink)
    settle(world)
    (pair,) = world.pairs
    pair.greet(source)
    settle(world)
    return world


def settle(world: SimWorld) -> None:
    """Threads that only react do so."""
    while True:
        drain(world, lambda move: move.do())
        ends = [
            end
            for worker in world.living
            for end in worker.link_ends
            if end.close_reason is not None or (not end.is_built and end.pipe.receiver is not None)
        ]
        if not ends:
            return
        if ends[0].close_reason is not None:
            ends[0].end("closed")
        else:
            ends[0].build()


def moves_of(world: SimWorld, path: Sequence[str]) -> list[Move]:
    """What may happen next."""
    moves = [*_progress(world)]
    if world.next_deadline() is not None:
        moves.append(Move("time", "tick", world.advance_to_next))
    if faults_of(path) < FAULTS_MAX:
        moves += _faults(world)
    return moves


def faults_of(path: Sequence[str]) -> int:
    """How many faults a path has."""
    return sum(label.startswith(("lose", "crash", "abort", "break")) for label in path)


def _progress(world: SimWorld) -> Iterator[Move]:
    for pair in world.pairs:
        if pair.source is not None:
            yield from _message_moves(pair, pair.source)
    for worker in world.living:
        for end in worker.link_ends:
            if end.can_move:
                yield Move("link", f"link {end.name} {worker.name}", end.move)
        for key in worker.source.queue:
            yield Move("host", f"schedule {key.request_id}", partial(worker.source.schedule, key))
        for key in worker.source.kvs:
            if key not in worker.source.finished:
                yield Move("host", f"compute {key.request_id}", partial(_compute, worker, key))
        for key in worker.sink.adopted_keys:
            yield Move("host", f"decode {key.request_id}", partial(worker.sink.finish, key))


def _message_moves(pair: Pair, source: SimSession) -> Iterator[Move]:
    for end, peer, arrow in ((pair.sink, source, "<"), (source, pair.sink, ">")):
        if end.is_lost or not end.worker.is_alive:
            continue
        if peer.wire:
            yield Move("deliver", f"deliver {pair.name}{arrow}", partial(deliver, end, peer))
        elif pair.is_broken:
            yield Move("notice", f"notice {pair.name}{arrow}", partial(end.lost, "cut off"))


def _compute(worker: SimWorker, key: HandoffKey) -> None:
    worker.begin_step(worker.source.compute(key, len(worker.source.prompts[key])))


def _faults(world: SimWorld) -> Iterator[Move]:
    for pair in world.pairs:
        if not pair.is_broken:
            for name, keep in (("nothing", lambda length: 0), ("all", lambda length: length)):
                label = f"lose {pair.name}, {name} arrives"
                yield Move("lose", label, partial(pair.sever, keep))
    for worker in world.workers:
        if not worker.is_alive:
            yield Move("restart", f"restart {worker.name}", partial(world.restart, worker))
            continue
        yield Move("crash", f"crash {worker.name}", partial(world.crash, worker))
        for key in worker.driver._source._handoffs:
            label = f"abort at the source {key.request_id}"
            yield Move("abort", label, partial(worker.source.abort, key))
        for key in worker.driver._sink._handoffs:
            label = f"abort at the sink {key.request_id}"
            yield Move("abort", label, partial(worker.sink.abort, key))
        for end in worker.link_ends:
            label = f"break {end.name} {worker.name}"
            yield Move("break", label, partial(end.end, "nothing from the peer"))


def state_of(world: SimWorld) -> Hashable:
    """Equal for two worlds that go on alike."""
    now = world.clock.now()
    workers = tuple(
        (
            worker.is_alive and fingerprint(worker),
            tuple(sorted((key.request_id, how) for key, how in worker.sink.ends.items())),
            tuple(sorted((key.request_id, how) for key, how in worker.source.ends.items())),
            tuple(worker.sink.adopted_keys),
            tuple(
                (end.name, end.is_built, end.window.next_seq, len(end.pipe.payloads))
                for end in worker.link_ends
            ),
            _due(worker, now) if worker.is_alive else None,
        )
        for worker in world.workers
    )
    wires = tuple(
        (pair.is_broken, tuple((end.is_lost, tuple(map(_name, end.wire))) for end in pair.ends))
        for pair in world.pairs
    )
    return workers, wires


def _due(worker: SimWorker, now: float) -> tuple[float, ...]:
    sides = (worker.driver._source, worker.driver._sink)
    times = [h.core.wakes_at for side in sides for h in side._handoffs.values()]
    return tuple(round(time - now, 6) for time in times)


def _name(message: SessionMessage) -> Hashable:
    return ("Prefill", message.key) if isinstance(message, Prefill) else message
