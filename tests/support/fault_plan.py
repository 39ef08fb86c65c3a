"""Which faults are made: at which step of the protocol, of which side, in which way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tests.support.fault_wire import CUT, Rule


class Blow(Enum):
    """What is done."""

    KILL = "kill"
    """SIGKILL of one side; it is started anew."""
    FREEZE = "freeze"
    """SIGSTOP of one side, SIGCONT later."""
    CUT = "cut"
    """No packet between the two sides."""
    ISOLATE = "isolate"
    """No packet between one side and anybody, the router included."""
    LOSS = "loss"
    """30 % of the packets between the two sides vanish."""
    DELAY = "delay"
    """200 ms for each packet between the two sides, one way."""


RULES = {
    Blow.CUT: CUT,
    Blow.ISOLATE: CUT,
    Blow.LOSS: Rule(loss=0.3),
    Blow.DELAY: Rule(delay_s=0.2),
}
OF_ONE_SIDE = frozenset({Blow.KILL, Blow.FREEZE, Blow.ISOLATE})


class Aim(Enum):
    """How the moment is hit."""

    HOLD = "hold"
    """The engine that enters the state stands still there until the blow has been struck."""
    TRACE = "trace"
    """The trace file says that the state was entered: milliseconds later, nothing stands still."""


SOURCE_STEPS = ("queued", "offered", "deferred", "streaming", "completed", "closed")
SINK_STEPS = (
    "requested",
    "reserving",
    "waiting",
    "receiving",
    "settling",
    "adopted",
    "decoding",
)
"""`decoding` is no state of the protocol: some tokens after `adopted`."""

STEPS = tuple(("source", state) for state in SOURCE_STEPS) + tuple(
    ("sink", state) for state in SINK_STEPS
)
PRESSED = frozenset({"deferred", "waiting"})
"""Entered only where a decode worker has no room."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One blow, struck when a handoff enters `state` on `side`."""

    blow: Blow
    side: str
    state: str
    victim: str
    """The side that is struck: "source" or "sink"; both, where it is the wire between them."""
    aim: Aim
    for_s: float | None = None
    """How long it lasts; None: for good."""
    round: int = 0

    def __str__(self) -> str:
        lasts = "" if self.for_s is None else f"-{self.for_s:g}s"
        whom = f"-{self.victim}" if self.blow in OF_ONE_SIDE else ""
        again = f"-again{self.round}" if self.round else ""
        return f"{self.blow.value}{whom}{lasts}-at-{self.side}-{self.state}-{self.aim.value}{again}"


SHORT_S = 1.0
"""Nobody gives up in this time."""
LONG_S = 9.0
"""Keepalives of sessions (6 s) and the router's patience (6.3 s) have run out."""
CUT_S = 3.0
WEATHER_S = 2.0

VICTIMS = ("source", "sink")


def process_faults() -> list[Fault]:
    """On one host: links over shared memory or loopback."""
    faults = [
        Fault(blow, side, state, victim, aim, for_s)
        for side, state in STEPS
        for victim in VICTIMS
        for aim in Aim
        for blow, for_s in ((Blow.KILL, None), (Blow.FREEZE, SHORT_S), (Blow.FREEZE, LONG_S))
    ]
    # A killed peer is what leaks most easily: once more, among other neighbours.
    faults += [
        Fault(Blow.KILL, side, state, victim, Aim.HOLD, round=1)
        for side, state in STEPS
        for victim in VICTIMS
    ]
    return faults


LASTING_STEPS = (
    ("sink", "requested"),
    ("source", "streaming"),
    ("sink", "receiving"),
    ("sink", "settling"),
    ("source", "completed"),
)


def network_faults() -> list[Fault]:
    """Each worker a host of its own: links over TCP through the wire."""
    faults = [
        Fault(blow, side, state, side, Aim.HOLD, for_s)
        for side, state in STEPS
        for blow, for_s in ((Blow.CUT, CUT_S), (Blow.LOSS, WEATHER_S), (Blow.DELAY, WEATHER_S))
    ]
    faults += [
        Fault(blow, side, state, victim, Aim.HOLD, for_s)
        for side, state in STEPS
        for victim in VICTIMS
        for blow, for_s in ((Blow.ISOLATE, CUT_S), (Blow.KILL, None))
    ]
    faults += [
        Fault(Blow.CUT, side, state, side, Aim.HOLD, LONG_S) for side, state in LASTING_STEPS
    ]
    faults += [
        Fault(Blow.ISOLATE, side, state, victim, Aim.HOLD)
        for side, state in LASTING_STEPS
        for victim in VICTIMS
    ]
    return faults


RAY_STEPS = (("source", "streaming"), ("sink", "receiving"), ("sink", "decoding"))


def ray_faults() -> list[Fault]:
    """Of a cluster with supervisor and real model."""
    return [
        Fault(blow, side, state, victim, Aim.TRACE, for_s)
        for side, state in RAY_STEPS
        for victim in VICTIMS
        for blow, for_s in ((Blow.KILL, None), (Blow.FREEZE, LONG_S))
    ]
