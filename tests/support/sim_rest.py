"""The end of every run: faults stop, and all that was begun has to end within its deadlines."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tests.support.sim_moves import Move, host_moves, transport_moves
from tests.support.sim_violation import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.sim_world import SimWorld

MOVES_MAX = 20_000
REST_S_MAX = 1500.0
"""More than all deadlines of a handoff one after the other."""


def come_to_rest(world: SimWorld, do: Callable[[Move], None]) -> None:
    """Let everything end, then the sessions, and look at what is left. `do` makes a move.

    Time passes only when nothing else can happen.
    """
    world.chances.clear()
    _thaw(world)
    started = world.clock.now()
    exhaust(world, do)
    while any(worker.driver.handoffs_open() for worker in world.living if worker.can_move):
        do(Move("time", "time", world.advance_to_next))
        require(world.clock.now() < started + REST_S_MAX, "P6: a handoff lives for ever")
        exhaust(world, do)
    for pair in world.pairs:
        if not pair.is_broken:
            pair.sever(world.some_of)
    exhaust(world, do)
    world.properties.at_the_end()


def exhaust(world: SimWorld, do: Callable[[Move], None]) -> None:
    """Move, in a random order, until nobody can any more without the passing of time."""
    for count in itertools.count():
        require(count < MOVES_MAX, "P6: it never comes to rest")
        drain(world, do)
        moves = transport_moves(world) or [
            # A prompt that found no room is not tried again before something has moved.
            move
            for move in host_moves(world)
            if move.kind != "schedule" or _has_room(world, move)
        ]
        if not moves:
            return
        do(world.rng.choice(moves))


def drain(world: SimWorld, do: Callable[[Move], None]) -> None:
    """Engines and loops of all workers, until they wait for somebody."""
    is_busy = True
    while is_busy:
        is_busy = False
        for worker in world.living:
            while worker.may_act and (worker.step is not None or worker.inbox):
                do(Move("engine", f"engine {worker.name}", worker.engine_move))
                is_busy = True
            while worker.can_move and worker.loop_calls:
                worker.loop_move()
                is_busy = True


def _thaw(world: SimWorld) -> None:
    for worker in world.living:
        if worker.is_frozen and world.rng.random() < 0.7:
            worker.freeze(False)
        elif worker.is_frozen:
            # Its peers' keepalive is not answered.
            for pair in world.pairs:
                if not pair.is_broken and any(end.worker is worker for end in pair.ends):
                    pair.sever(world.some_of)


def _has_room(world: SimWorld, move: Move) -> bool:
    _, name, request = move.label.split()
    worker = world.at(name)
    assert worker is not None
    key = next(key for key in worker.source.queue if key.request_id == request)
    needed = worker.kv_cache.layout.round_up(len(worker.source.queue[key]))
    has_row = worker.kv_cache.rows.num_free > 0
    return has_row and worker.kv_cache.free_or_evictable() >= needed
