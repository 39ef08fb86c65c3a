"""Runs in which peers say anything: no driver may raise, and all KV is given back.

What is true between correct peers (the same tokens, success on both sides) is not asked for here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.protocol import messages as m
from kv_transfer.protocol.key import HandoffKey
from kvferry.cache_key import CacheUse
from kvferry.errors import ErrorKind
from kvferry.generation import OutputToken
from kvferry.ids import Attempt, ExtraKey, Incarnation, RequestId, WorkerId
from kvferry.sampling import SamplingParams
from tests.support.sim_moves import Move
from tests.support.sim_run import SimRun

if TYPE_CHECKING:
    import random

    from tests.support.sim_session import SimSession

NUMBERS = (0, 1, 2, 3, 4, 8, 12, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_USE = CacheUse(ExtraKey(""))


class WildRun(SimRun):
    """As a seeded run, with lies among the moves."""

    def __init__(self, seed: int, wildness: float) -> None:
        super().__init__(seed)
        self._wildness = wildness
        world = self.world
        world.has_faults = world.is_anything_wild = world.is_lying = True

    def _random_move(self) -> None:
        ends = [end for pair in self.world.pairs for end in pair.ends]
        ends = [end for end in ends if end.is_open and not end.is_lost and end.worker.can_move]
        if ends and self.rng.random() < self._wildness:
            end = self.rng.choice(ends)
            message = anything(self.rng, end)
            label = f"lie to {end.worker.name}: {type(message).__name__}"
            self._do(Move("lie", label, partial(end.receive, message)))
        else:
            super()._random_move()


def anything(rng: random.Random, end: SimSession) -> m.SessionMessage:
    """A message with random content, mostly of a kind that may come that way."""
    key, number, text = _some_key(rng, end), partial(rng.choice, NUMBERS), "because"
    layout = rng.choice((end.worker.driver._endpoint.hello.layout_hash, "other"))
    tokens = tuple(OutputToken(number() % 2**31) for _ in range(rng.choice((0, 1, 1, 2))))
    lengths = (0, 1, 5, 9, 40)
    prompt = np.asarray([number() % 2**31 for _ in range(rng.choice(lengths))], np.int32)
    generation = max(1, rng.choice((number(), end.links._generation, end.links._generation + 1)))
    lane = rng.choice((0, 0, 1, 2**31))
    to_source = (
        lambda: m.Prefill(key, prompt, SamplingParams(n=rng.choice((1, 2))), _USE, layout),
        lambda: m.Prefill(key, prompt, SamplingParams(), _USE, layout, held_only=True),
        lambda: m.Grant(key, number(), number()),
        lambda: m.Busy(key),
        lambda: m.Received(key),
        lambda: m.KvOffer(key, "nowhere", prompt, _USE),
    )
    to_sink = (
        lambda: m.Ready(key, number(), layout, number()),
        lambda: m.FirstToken(key, tokens),
        lambda: m.Complete(key, number(), rng.choice((None, generation))),
        lambda: m.Closed(key),
        lambda: m.LinkRendezvous(generation, lane, "begin", rng.choice((b"gloo", b"", b"\xff"))),
    )
    either = (
        lambda: m.Abort(key, text, rng.choice((None, *ErrorKind))),
        lambda: m.Aborted(key),
        lambda: m.LinkDown(generation, text),
        lambda: m.LinkRendezvous(generation, lane, "other", b""),
        lambda: m.LinkSignal(generation, lane, rng.choice(list(m.Signal)), number()),
    )
    hello = (lambda: m.Hello(WorkerId("x"), Incarnation(number()), layout, number(), 1),)
    wrong = (*to_source, *to_sink, *hello)
    fitting = (*(to_source if end.is_source else to_sink), *either)
    return rng.choice(fitting if rng.random() < 0.97 else wrong)()


def _some_key(rng: random.Random, end: SimSession) -> HandoffKey:
    driver = end.worker.driver
    side = driver._source if end.is_source else driver._sink
    known = [*side._handoffs, *side._tombstones._outcomes]
    if known and rng.random() < 0.7:
        return rng.choice(known[-6:])
    peer = end.pair.other(end)
    theirs = Incarnation(rng.choice(NUMBERS)) if peer is None else peer.worker.incarnation
    ours = end.worker.incarnation
    pair = (ours, theirs) if end.is_source else (theirs, ours)
    return HandoffKey(RequestId(f"wild-{rng.randrange(10**6)}"), Attempt(1), *pair)
