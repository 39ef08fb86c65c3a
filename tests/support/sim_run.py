"""One seeded run: a shape, a phase of faults, and the return to rest."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from tests.support.sim_moves import Move, fault_moves, host_moves, transport_moves
from tests.support.sim_rest import come_to_rest
from tests.support.sim_world import Setup, SimWorld, WorkerSetup

if TYPE_CHECKING:
    from kvferry.ids import TokenIds

MOVES_MAX = 120
"""Of the phase of faults."""

_NORMAL = {
    "engine": 30,
    "loop": 30,
    "deliver": 25,
    "greet": 20,
    "notice": 5,
    "build": 10,
    "send": 15,
    "take": 15,
    "end": 3,
    "schedule": 10,
    "compute": 10,
    "checkpoint": 12,
    "decode": 3,
    "unfill": 2,
}
_FAULTS = {
    "fill": 6.0,
    "abort": 2.0,
    "break": 2.0,
    "lose": 0.7,
    "crash": 0.2,
    "freeze": 0.5,
    "stale": 3.0,
    "double": 3.0,
    "forge": 1.0,
}


class SimRun:
    """`run` raises `Violation` or any assertion of the code itself; `trace` says what led to it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.trace: list[str] = []
        self.happened: Counter[str] = Counter()
        rng = self.rng
        self.has_faults = rng.random() < 0.9
        self.world = SimWorld(_setup(rng, self.has_faults), rng)
        # Where all prompts begin alike, some are computed twice at a time.
        self._bases = [self._tokens(14) for _ in range(rng.choice((1, 2)))]
        self._weights = self._draw_weights()
        self._rate = rng.choice((0.01, 0.04, 0.15)) if self.has_faults else 0.05

    def run(self) -> None:
        """The whole of it."""
        for _ in range(self.rng.randint(20, MOVES_MAX)):
            self._random_move()
        come_to_rest(self.world, self._do)
        for worker in self.world.workers:
            self.happened += Counter(worker.driver.counters)

    # --- the phase of faults ---

    def _draw_weights(self) -> tuple[dict[str, float], dict[str, float]]:
        rng = self.rng
        normal = {kind: rng.choice((1, 1, 1, 0.2)) * weight for kind, weight in _NORMAL.items()}
        if not self.has_faults:
            return normal, {"fill": 1.0}
        # Most runs have a few kinds of faults, so that what follows one is seen.
        faults = {kind: rng.choice((0, 0, 1, 4)) * weight for kind, weight in _FAULTS.items()}
        faults["restart"] = 1.0
        return normal, faults

    def _random_move(self) -> None:
        world, dice = self.world, self.rng.random()
        if dice < self._rate:
            moves, weights = list(fault_moves(world)), self._weights[1]
            moves = [move for move in moves if weights.get(move.kind)]
        elif dice < self._rate + 0.06:
            self._do(Move("request", "request", self._request))
            return
        elif dice < self._rate + 0.09:
            self._do(Move("time", "time", self._time))
            return
        else:
            moves, weights = transport_moves(world) + host_moves(world), self._weights[0]
        if moves:
            (move,) = self.rng.choices(moves, [weights[move.kind] for move in moves])
            self._do(move)

    def _do(self, move: Move) -> None:
        self.trace.append(move.label)
        move.do()
        self.happened[f"move {move.kind}"] += 1
        self.world.properties.after_move()

    def _request(self) -> None:
        world, rng = self.world, self.rng
        able = [worker for worker in world.living if worker.can_move and worker.step is None]
        if not self.has_faults:
            # Two workers that wait for one another's slots end by a deadline, which is a fault.
            able = [worker for worker in able if worker is not world.workers[0]]
        if not able or len(world.requests) >= 5:
            return
        sink = rng.choice(able)
        others = [worker for worker in world.living if worker is not sink]
        if not others:
            return
        failed = [
            key
            for key, how in sink.sink.ends.items()
            if how not in ("adopted", "own abort") and world.has_asked_for(key)
        ]
        if failed and rng.random() < 0.7:
            world.fetch(world.requests[failed[-1]], rng.choice(others), sink)
            return
        if self.has_faults:
            # Roles may meet crosswise, and wait for one another's slots.
            world.has_faults = True
        held_only = self.has_faults and rng.random() < 0.1
        request = world.new_request(self._prompt(), rng.choice((1, 1, 2)), held_only=held_only)
        is_free = self.has_faults and rng.random() < 0.3
        world.fetch(request, rng.choice(others) if is_free else others[0], sink)

    def _time(self) -> None:
        due = self.world.next_deadline()
        now = self.world.clock.now()
        if self.has_faults and due is not None and self.rng.random() < 0.4:
            self.world.has_faults = True
            self.world.advance(max(0.0, due - now))
        else:
            self.world.advance(self.rng.choice((0.001, 0.02, 0.5)))

    # --- what it is about ---

    def _prompt(self) -> TokenIds:
        rng = self.rng
        base = rng.choice(self._bases)
        prompt = base[: rng.randint(1, len(base))]
        if rng.random() < 0.4:
            prompt = np.concatenate(
                (prompt[: rng.randint(0, len(prompt))], self._tokens(rng.randint(1, 5)))
            )
        return prompt

    def _tokens(self, length: int) -> TokenIds:
        return np.asarray([self.rng.randint(1, 200) for _ in range(length)], np.int32)


def _setup(rng: random.Random, has_faults: bool) -> Setup:
    ranks = rng.choice(((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 2, 1), (2, 2, 2)))
    shapes = []
    for index in range(rng.choice((2, 2, 2, 3))):
        page_size = rng.choice((1, 2, 4))
        slots = rng.choice((20, 24, 40))
        rows, buffer_tokens = rng.choice((2, 4)), rng.choice((1, 2, 2, 5))
        shapes.append(WorkerSetup("", page_size, slots, rows, ranks[index], buffer_tokens))
    chances = {
        name: rng.choice((0, 0, 0, 0, 0, 0.1, 0.5))
        for name in ("busy", "never room", "refuse prompt", "refuse tokens", "repeat payload")
    }
    return Setup(
        workers=tuple(shapes),
        heads=max(ranks),
        buffers=rng.choice((1, 2, 3)),
        checksums=rng.random() < 0.2,
        links_max=rng.choice((64, 64, 1)),
        sent_early=rng.random() < 0.5,
        preempts=rng.choice((0.0, 0.1, 0.3)) if has_faults else 0.0,
        chances=chances if has_faults else {},
    )
