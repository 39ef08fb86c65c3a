"""Golden transcripts: a script of moves, and what is said and done at each.

A file is text (`# `), commands (`> `) and, below each command, what happened. `python -m pytest
tests/scenarios --rewrite-scenarios` writes the latter anew.

| command | what it does |
|---|---|
| fetch TOKENS [of SAMPLES] [held] | the decode worker asks for a prompt; the n-th is `rn` |
| retry rN | the next attempt of it |
| cached TOKENS | the decode worker has that beginning of the next prompt |
| computed TOKENS | the prefill worker has it |
| open session | the call reaches the prefill worker |
| messages | all control messages are delivered, until nothing is under way |
| message to prefill, message to decode | one of a handoff is |
| schedule rN | the prompt gets a row and slots |
| compute rN to TOKENS | one step up to that token; the last one samples |
| begin rN to TOKENS, end step | the same, with room between two layers |
| link | links are built, payloads gathered and scattered, until nothing is under way |
| gather, scatter | one payload is |
| no room, room | the decode worker refuses, or no longer |
| abort at prefill rN, abort at decode rN | the host gives up |
| lose session, lose session after delivery | what is under way is lost with it, or arrives |
| break link | the prefill worker's end fails |
| kill prefill, kill decode | SIGKILL; with `restart prefill` a new process |
| tick | time passes until something is due |
| wait | the same with all messages, until every handoff has ended; only the last is shown |
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.protocol.messages import LinkMessage, LinkSignal
from tests.support.sim_link import SimSender
from tests.support.sim_moves import deliver
from tests.support.sim_rest import come_to_rest, drain
from tests.support.sim_world import Setup, SimWorld, WorkerSetup

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.protocol.key import HandoffKey
    from tests.support.sim_session import SimSession
    from tests.support.sim_worker import SimWorker


class Scenario:
    """Runs the commands of one file."""

    def __init__(self) -> None:
        shapes = (
            WorkerSetup("prefill", page_size=2, slots=16, buffer_tokens=2),
            WorkerSetup("decode", page_size=2, slots=16, buffer_tokens=2),
        )
        self.world = SimWorld(Setup(shapes, buffers=2), random.Random(0))
        # What a script does to it is its own business.
        self.world.has_faults = True
        self.tokens = np.arange(11, 43, dtype=np.int32)
        self.accounts: dict[str, str] = {}
        self._numbers = 0

    def transcript(self, text: str) -> str:
        """The file as it should be. At its end the world is brought to rest and looked at."""
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("#") or (not line and lines and lines[-1]):
                lines.append(line)
            elif line.startswith("> "):
                lines += [line, *self._do(line[2:])]
        self.world.log = None
        come_to_rest(self.world, lambda move: move.do())
        return "\n".join(lines).rstrip("\n") + "\n"

    def _do(self, command: str) -> list[str]:
        log: list[str] = []
        self.world.log = log
        verb, _, rest = command.partition(" ")
        _COMMANDS[verb](self, rest)
        drain(self.world, lambda move: move.do())
        self.world.properties.after_move()
        said = [line for line in log if " LinkSignal " not in line]
        return [*said, *self._changed_accounts()]

    def _changed_accounts(self) -> list[str]:
        changed = []
        for worker in self.world.living:
            accounts = worker.kv_cache.accounts()
            held = {
                "cached": accounts.evictable,
                "locked": accounts.protected,
                "private": accounts.private,
                "inbound": accounts.inbound,
                "pinned": accounts.outbound_pinned,
            }
            text = ", ".join(f"{count} {name}" for name, count in held.items() if count)
            text = f"{worker.name}: slots: {text or 'all free'}"
            if self.accounts.get(worker.name, f"{worker.name}: slots: all free") != text:
                changed.append(text)
            self.accounts[worker.name] = text
        return changed

    # --- commands ---

    def at(self, name: str) -> SimWorker:
        """The living worker of that name."""
        worker = self.world.at(name)
        assert worker is not None, f"{name} is dead"
        return worker

    def fetch(self, rest: str) -> None:
        """See the table."""
        words = rest.split()
        samples = int(words[words.index("of") + 1]) if "of" in words else 1
        self._numbers += 1
        request = self.world.new_request(
            self.tokens[: int(words[0])],
            samples,
            held_only="held" in words,
            name=f"r{self._numbers}",
        )
        self.world.fetch(request, self.at("prefill"), self.at("decode"))

    def retry(self, rest: str) -> None:
        """See the table."""
        request = next(r for r in self.world.requests.values() if r.name == rest)
        self.world.fetch(request, self.at("prefill"), self.at("decode"))

    def cached(self, name: str, tokens: str) -> None:
        """See the table."""
        worker = self.at(name)
        worker.fillers.open("before", self.tokens[: int(tokens)])
        worker.fillers.close(publish=True)

    def open_session(self, rest: str) -> None:
        """See the table."""
        del rest
        for pair in self.world.pairs:
            if pair.source is None and not pair.sink.is_lost:
                pair.greet(self.world.at("prefill"))

    def message(self, rest: str) -> None:
        """See the table."""
        ends = [end for end in self._ends() if end.worker.name == rest.removeprefix("to ")]
        is_of_a_link = True
        while is_of_a_link:
            end = next(end for end in ends if self._peer(end).wire)
            is_of_a_link = isinstance(self._peer(end).wire[0], LinkMessage)
            deliver(end, self._peer(end))

    def messages(self, rest: str) -> None:
        """See the table."""
        del rest
        while ends := [end for end in self._ends() if self._peer(end).wire]:
            deliver(ends[0], self._peer(ends[0]))
            drain(self.world, lambda move: move.do())

    def schedule(self, rest: str) -> None:
        """See the table."""
        worker = self.at("prefill")
        worker.source.schedule(self._key(worker.source.queue, rest))

    def compute(self, rest: str) -> None:
        """See the table."""
        name, _, stop = rest.partition(" to ")
        worker = self.at("prefill")
        worker.begin_step(worker.source.compute(self._key(worker.source.kvs, name), int(stop)))

    def begin(self, rest: str) -> None:
        """See the table. The engine is in the midst of a step until `end step`."""
        self.compute(rest)
        self.at("prefill").is_paused = True

    def end(self, rest: str) -> None:
        """See the table."""
        del rest
        self.at("prefill").is_paused = False

    def link(self, rest: str) -> None:
        """See the table."""
        del rest
        while self._build() or self._move_link(SimSender, None):
            drain(self.world, lambda move: move.do())
            self._deliver_credits()

    def gather(self, rest: str) -> None:
        """See the table."""
        del rest
        while self._build():
            pass
        assert self._move_link(SimSender, True)
        drain(self.world, lambda move: move.do())

    def scatter(self, rest: str) -> None:
        """See the table."""
        del rest
        assert self._move_link(SimSender, False)

    def no(self, rest: str) -> None:
        """See the table."""
        assert rest == "room"
        self.world.chances["busy"] = 1.0

    def room(self, rest: str) -> None:
        """See the table."""
        del rest
        self.world.chances.clear()

    def abort(self, rest: str) -> None:
        """See the table."""
        _, name, request = rest.split()
        worker = self.at(name)
        if name == "prefill":
            worker.source.abort(self._key(worker.driver._source._handoffs, request))
        else:
            worker.sink.abort(self._key(worker.driver._sink._handoffs, request))

    def lose(self, rest: str) -> None:
        """See the table."""
        for pair in self.world.pairs:
            if pair.is_broken:
                continue
            pair.sever(lambda length: length if "after" in rest else 0)
            self.messages("")
            for end in pair.ends:
                end.lost("cut off")

    def break_link(self, rest: str) -> None:
        """See the table."""
        del rest
        end = next(end for end in self.at("prefill").link_ends if isinstance(end, SimSender))
        end.end("nothing from the peer")

    def kill(self, rest: str) -> None:
        """See the table."""
        self.at(rest).die()
        self.accounts.pop(rest, None)
        for pair in self.world.pairs:
            for end in pair.ends:
                end.lost("the peer is dead")

    def restart(self, rest: str) -> None:
        """See the table."""
        dead = next(worker for worker in self.world.workers if worker.name == rest)
        self.world.restart(dead)

    def tick(self, rest: str) -> None:
        """See the table."""
        del rest
        before = self.world.clock.now()
        self.world.say("")
        self.world.advance_to_next()
        assert self.world.log is not None
        self.world.log[0] = f"{self.world.clock.now() - before:.2f} s pass"

    def wait(self, rest: str) -> None:
        """See the table."""
        del rest
        times, log = 0, self.world.log
        assert log is not None
        started = self.world.clock.now()
        while any(worker.driver.handoffs_open() for worker in self.world.living):
            log.clear()
            self.world.advance_to_next()
            times += 1
            self.messages("")
        log.insert(0, f"time passes {times} times, {self.world.clock.now() - started:.1f} s")

    # --- inside ---

    def _ends(self) -> list[SimSession]:
        return [
            end
            for pair in self.world.pairs
            if pair.source is not None
            for end in pair.ends
            if not end.is_lost and end.worker.can_move
        ]

    @staticmethod
    def _peer(end: SimSession) -> SimSession:
        peer = end.pair.other(end)
        assert peer is not None
        return peer

    @staticmethod
    def _key(keys: dict[HandoffKey, object], request: str) -> HandoffKey:
        return next(key for key in keys if key.request_id == request)

    def _deliver_credits(self) -> None:
        for end in self._ends():
            while self._peer(end).wire and isinstance(self._peer(end).wire[0], LinkSignal):
                end.receive(self._peer(end).wire.popleft())

    def _build(self) -> bool:
        for worker in self.world.living:
            for end in list(worker.link_ends):
                if end.close_reason is not None:
                    end.end("closed")
                    return True
                if not end.is_built and end.pipe.receiver is not None:
                    end.build()
                    drain(self.world, lambda move: move.do())
                    self._deliver_credits()
                    return True
        return False

    def _move_link(self, kind: type, is_kind: bool | None) -> bool:
        for worker in self.world.living:
            for end in worker.link_ends:
                if end.can_move and is_kind in (None, isinstance(end, kind)):
                    end.move()
                    return True
        return False


_COMMANDS: dict[str, Callable[[Scenario, str], None]] = {
    "fetch": Scenario.fetch,
    "retry": Scenario.retry,
    "cached": lambda scenario, rest: scenario.cached("decode", rest),
    "computed": lambda scenario, rest: scenario.cached("prefill", rest),
    "open": Scenario.open_session,
    "message": Scenario.message,
    "messages": Scenario.messages,
    "schedule": Scenario.schedule,
    "compute": Scenario.compute,
    "begin": Scenario.begin,
    "end": Scenario.end,
    "link": Scenario.link,
    "gather": Scenario.gather,
    "scatter": Scenario.scatter,
    "no": Scenario.no,
    "room": Scenario.room,
    "abort": Scenario.abort,
    "lose": Scenario.lose,
    "break": Scenario.break_link,
    "kill": Scenario.kill,
    "restart": Scenario.restart,
    "tick": Scenario.tick,
    "wait": Scenario.wait,
}
