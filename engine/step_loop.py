"""The engine thread: drain the inbox, look at deadlines, step, tell. Nothing else touches KV."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvferry.accounts import HostAccounts, KvAccounts, WorkerLoad
from kvferry.errors import InternalError, WorkerUnavailable
from kvferry.limits import ENGINE_IDLE_WAIT_S, IDLE_AUDIT_INTERVAL_S, STOP_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.engine import Engine
    from kvferry.clock import Clock
    from kvferry.errors import KvferryError

_log = logging.getLogger(__name__)


class LoopPart(Protocol):
    """Something that lives on the engine thread beside the engine: a role, the handoff driver.

    handle: called for each event from the inbox, until one part says it was its own.
    tick: called at least every `ENGINE_IDLE_WAIT_S` and after each batch of events.
    flush: called after each step, and before it if an event came or nothing was computed last; what
        was gathered is sent off here. Before, so that a token that came with a handoff does not
        wait for the step it makes possible.
    stop: called once, with the reason, when the loop ends. The process ends with it, so this
        tells those outside and leaves the KV alone, which may be in any state after a fault.
    """

    def handle(self, event: object) -> bool:
        """Whether the event was this part's."""
        ...

    def tick(self) -> None:
        """Act on deadlines that have passed."""
        ...

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, on the loop's clock; None when it has not."""
        ...

    def flush(self) -> None:
        """Send off what was produced since the last call."""
        ...

    def stop(self, error: KvferryError) -> None:
        """Tell everyone this part serves that it ends with `error`."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What the engine thread last said of itself. Immutable, so other threads may read it."""

    load: WorkerLoad
    accounts: KvAccounts
    host_accounts: HostAccounts | None = None
    """None without a host tier."""
    counters: Mapping[str, int] = field(default_factory=dict)


class SnapshotSource(Protocol):
    """Completes the snapshot with what only the handoff driver knows."""

    @property
    def link_bytes_per_s(self) -> float:
        """Measured payload rate of this worker's links; 0 before the first payload."""
        ...

    @property
    def counters(self) -> Mapping[str, int]:
        """What happened since the start."""
        ...

    def handoffs_open(self) -> int:
        """Handoffs in flight, on either side."""
        ...


class StepLoop:
    """Owns the engine thread and its inbox.

    An unexpected exception ends the loop: every stream ends with an error, and `is_alive` turns
    false so that the supervisor starts a fresh process.
    """

    def __init__(self, engine: Engine, handoffs: SnapshotSource, clock: Clock) -> None:
        self._engine = engine
        self._handoffs = handoffs
        self._clock = clock
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._parts: tuple[LoopPart, ...] = ()
        self._stopping = threading.Event()
        self._computed = False
        self._audited_at = clock.now()
        self._audited_steps = 0
        self._last_turn_s = clock.now()
        # A copy between tiers that is done is finished by the step's poll.
        engine.kv_cache.on_copy_done = lambda: self.post(None)
        engine.constraints.on_compiled = lambda: self.post(None)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.snapshot = self._take_snapshot()

    def now(self) -> float:
        """Seconds of the engine's clock. From any thread."""
        return self._clock.now()

    def post(self, event: object) -> None:
        """Hand an event to the engine thread. From any thread; never blocks."""
        self._inbox.put(event)

    def start(self, parts: Sequence[LoopPart]) -> None:
        """Start the thread. Each event goes to the first of `parts` that takes it."""
        self._parts = tuple(parts)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step. Raises `InternalError` if it does not end."""
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise InternalError(f"engine thread still in a step after {STOP_TIMEOUT_S} s")

    def is_alive(self) -> bool:
        """Whether the thread still serves."""
        return self._thread.is_alive() and not self._stopping.is_set()

    def seconds_since_turn(self) -> float:
        """Time since the loop last came round: the measure of progress."""
        return self._clock.now() - self._last_turn_s

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
            self._end(WorkerUnavailable("the worker is stopping"))
        except Exception as error:  # noqa: BLE001 - outermost frame of the thread
            _log.exception("engine thread ends")
            self._stopping.set()
            self._end(WorkerUnavailable(f"the engine failed: {error!r}"))

    def _turn(self) -> None:
        events = self._drain()
        for event in events:
            if event is not None and not any(part.handle(event) for part in self._parts):
                raise AssertionError(f"no part takes {event!r}")
        for part in self._parts:
            part.tick()
        # Right after a step there is nothing new: whole turns take less than a millisecond.
        is_flushed = bool(events) or not self._computed
        if is_flushed:
            self._flush()
        self._computed = self._engine.step()
        if self._computed or not is_flushed:
            self._flush()
        if (
            not self._computed
            and self.snapshot.accounts.rows_live == self._engine.kv_cache.copies_in_flight == 0
        ):
            self._audit_idle()
        self._last_turn_s = self._clock.now()

    def _audit_idle(self) -> None:
        """Run every ledger check now and then, while nobody waits for it."""
        now, steps = self._clock.now(), self._engine.steps
        if steps == self._audited_steps or now < self._audited_at + IDLE_AUDIT_INTERVAL_S:
            return
        self._engine.kv_cache.audit()
        assert self.snapshot.accounts.is_idle, f"check 9: {self.snapshot.accounts} with no request"
        self._audited_at, self._audited_steps = now, steps

    def _flush(self) -> None:
        # Before the news leave: who has read the end of a request finds the accounts without it.
        self.snapshot = self._take_snapshot()
        for part in self._parts:
            part.flush()

    def _drain(self) -> list[object]:
        """All events that are there; waits for the first one if the last step had nothing to do.

        Requests may be waiting even then, for KV that only an event or a deadline sets free.
        """
        events: list[object] = []
        try:
            if not self._computed:
                events.append(self._inbox.get(timeout=self._idle_wait()))
        except queue.Empty:
            return events
        # Only this thread takes from it.
        while not self._inbox.empty():
            events.append(self._inbox.get_nowait())
        return events

    def _idle_wait(self) -> float:
        wait = ENGINE_IDLE_WAIT_S
        now = self._clock.now()
        for part in self._parts:
            deadline = part.next_deadline()
            if deadline is not None:
                wait = min(wait, deadline - now)
        return max(wait, 0.0)

    def _end(self, error: KvferryError) -> None:
        for part in self._parts:
            try:
                part.stop(error)
                part.flush()
            except Exception:  # noqa: BLE001 - the others must be told whatever this one does
                _log.exception("a part of the engine thread cannot end")

    def _take_snapshot(self) -> EngineSnapshot:
        scheduler, kv_cache = self._engine.scheduler, self._engine.kv_cache
        drafts = self._engine.drafts
        return EngineSnapshot(
            load=WorkerLoad(
                running=scheduler.running,
                waiting=scheduler.waiting,
                waiting_tokens=scheduler.uncomputed_tokens,
                handoffs=self._handoffs.handoffs_open(),
                prefill_tokens_per_s=self._engine.prefill_tokens_per_s,
                link_bytes_per_s=self._handoffs.link_bytes_per_s,
            ),
            accounts=kv_cache.accounts(),
            host_accounts=kv_cache.host_accounts(),
            counters={
                **self._handoffs.counters,
                **scheduler.counters,
                **kv_cache.counters,
                **({} if drafts is None else drafts.counters),
                **self._engine.step_counts.counters,
                "engine_steps": self._engine.steps,
            },
        )
