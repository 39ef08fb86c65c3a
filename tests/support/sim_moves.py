"""Every move that a world allows at a time, by kind. Kinds are what a run draws from."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from kv_transfer.protocol.key import HandoffKey
from tests.support.sim_link import SimReceiver, SimSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_transfer.protocol.messages import SessionMessage
    from tests.support.sim_session import Pair, SimSession
    from tests.support.sim_worker import SimWorker
    from tests.support.sim_world import SimWorld


class Move(NamedTuple):
    """One thing that may happen next."""

    kind: str
    label: str
    do: Callable[[], object]


def transport_moves(world: SimWorld) -> list[Move]:
    """What threads and network do by themselves. Without any, nothing is under way."""
    moves: list[Move] = []
    for worker in world.workers:
        if not worker.can_move:
            continue
        if worker.step is not None or worker.inbox:
            moves.append(Move("engine", f"engine {worker.name}", worker.engine_move))
        if worker.loop_calls:
            moves.append(Move("loop", f"loop {worker.name}", worker.loop_move))
        for end in worker.link_ends:
            _end_moves(end, moves)
    for pair in world.pairs:
        if not pair.is_over:
            _pair_moves(world, pair, moves)
    return moves


def _end_moves(end: SimSender | SimReceiver, moves: list[Move]) -> None:
    if end.close_reason is not None:
        moves.append(Move("end", f"end {end.name}", partial(end.end, "closed")))
    if not end.is_built:
        # A sender finds its receiver; a receiver only listens.
        if end.close_reason is None and end.pipe.receiver is not None:
            moves.append(Move("build", f"build {end.name}", end.build))
    elif isinstance(end, SimSender):
        if end.can_send:
            moves.append(Move("send", f"send {end.name}", end.send))
    elif end.can_take:
        moves.append(Move("take", f"take {end.name}", end.take))


def _pair_moves(world: SimWorld, pair: Pair, moves: list[Move]) -> None:
    sink, source = pair.sink, pair.source
    if source is None:
        if sink.is_lost or not sink.worker.can_move:
            return
        there = world.at(pair.expected.address)
        if pair.is_broken:
            moves.append(Move("notice", f"notice {pair.name}", partial(sink.lost, "cut off")))
        elif there is None or not there.is_frozen:
            moves.append(Move("greet", f"greet {pair.name}", partial(pair.greet, there)))
        return
    for end, peer, arrow in ((sink, source, "<"), (source, sink, ">")):
        if end.is_lost or not end.worker.can_move:
            continue
        if peer.wire:
            label = f"deliver {pair.name}{arrow} {type(peer.wire[0]).__name__}"
            moves.append(Move("deliver", label, partial(deliver, end, peer)))
        elif pair.is_broken:
            moves.append(Move("notice", f"notice {pair.name}{arrow}", partial(end.lost, "cut off")))


def deliver(end: SimSession, peer: SimSession) -> None:
    """The next message of `peer` reaches `end`."""
    message = peer.wire.popleft()
    world = end.worker.world
    if world.log is not None:
        world.say(f"{peer.worker.name} -> {end.worker.name}: {told(message)}")
    end.receive(message)


def told(message: SessionMessage) -> str:
    """A message in one line, without what is the same in all of them."""
    words = [type(message).__name__]
    for field in fields(message):
        value = attrgetter(field.name)(message)
        if isinstance(value, HandoffKey):
            words.append(f"{value.request_id}#{value.attempt}")
        elif field.name == "prompt":
            words.append(f"prompt of {len(value)}")
        elif field.name == "tokens" and isinstance(value, tuple):
            words.append(f"tokens {[token.token_id for token in value]}")
        elif isinstance(value, Enum):
            words.append(value.value)
        elif field.name not in _SILENT and value not in (b"", False, None):
            words.append(f"{field.name} {value!r}")
    return " ".join(words)


_SILENT = {
    *("store_value", "sampling", "cache_use", "layout_hash", "hit_tokens", "host_hit_tokens"),
    "marks",
}


def host_moves(world: SimWorld) -> list[Move]:
    """What schedulers do when their engine is between two events."""
    moves: list[Move] = []
    for worker in world.workers:
        if worker.can_move and worker.step is None:
            _source_moves(worker, moves)
            for key in list(worker.sink.adopted_keys)[:1]:
                label = f"decode {worker.name} {key.request_id}"
                moves.append(Move("decode", label, partial(worker.sink.finish, key)))
            if worker.fillers.live:
                moves.append(Move("unfill", f"unfill {worker.name}", partial(_unfill, worker)))
    return moves


def _source_moves(worker: SimWorker, moves: list[Move]) -> None:
    source, name = worker.source, worker.name
    for key in source.queue:
        label = f"schedule {name} {key.request_id}"
        moves.append(Move("schedule", label, partial(source.schedule, key)))
    for key, kv in source.kvs.items():
        if key in source.finished or kv.committed_len == len(source.prompts[key]):
            continue
        moves.append(
            Move("compute", f"compute {name} {key.request_id}", partial(_compute, worker, key))
        )
        if kv.committed_len > kv.cache_protected_len:
            label = f"checkpoint {name} {key.request_id}"
            moves.append(Move("checkpoint", label, partial(source.checkpoint, key)))


def _compute(worker: SimWorker, key) -> None:
    committed, length = worker.source.kvs[key].committed_len, len(worker.source.prompts[key])
    stop = worker.world.rng.randint(committed + 1, length)
    worker.begin_step(worker.source.compute(key, stop))


def _unfill(worker: SimWorker) -> None:
    worker.fillers.close(worker.world.rng.random() < 0.5)


def fault_moves(world: SimWorld) -> Iterator[Move]:
    """What goes wrong, and what nobody else has to expect."""
    for worker in world.workers:
        if worker.is_alive:
            yield from _worker_faults(world, worker)
        else:
            yield Move("restart", f"restart {worker.name}", partial(world.restart, worker))
    for pair in world.pairs:
        if not pair.is_over:
            yield from _pair_faults(world, pair)


def _worker_faults(world: SimWorld, worker: SimWorker) -> Iterator[Move]:
    name = worker.name
    yield Move("crash", f"crash {name}", partial(world.crash, worker))
    yield Move("freeze", f"freeze {name}", partial(_freeze, world, worker))
    if worker.is_frozen:
        return
    if worker.step is None:
        yield Move("fill", f"fill {name}", partial(world.fill, worker))
        yield Move("abort", f"abort at {name}", partial(world.abort_something, worker))
    for end in worker.link_ends:
        yield Move("break", f"break {end.name}", partial(_break, world, end))


def _pair_faults(world: SimWorld, pair: Pair) -> Iterator[Move]:
    if not pair.is_broken:
        yield Move("lose", f"lose {pair.name}", partial(_lose, world, pair))
    for end in pair.ends:
        peer = pair.other(end)
        if end.is_lost or not end.is_open or not end.worker.can_move or peer is None:
            continue
        yield Move("stale", f"stale at {end.worker.name}", partial(world.say_stale, end))
        if end.is_source:
            yield Move("forge", f"forge at {end.worker.name}", partial(world.forge, end))
        if peer.wire:
            yield Move("double", f"double {pair.name}", partial(_double, world, peer))


def _freeze(world: SimWorld, worker: SimWorker) -> None:
    world.has_faults = True
    worker.freeze(not worker.is_frozen)


def _break(world: SimWorld, end) -> None:
    world.has_faults = True
    end.end("nothing from the peer")


def _lose(world: SimWorld, pair: Pair) -> None:
    world.has_faults = True
    pair.sever(world.some_of)


def _double(world: SimWorld, peer: SimSession) -> None:
    """A bug of the transport: the same message twice."""
    world.has_faults = world.is_anything_wild = True
    peer.wire.appendleft(peer.wire[0])
