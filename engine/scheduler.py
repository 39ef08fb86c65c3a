"""Which sequences the next step computes, and how many tokens of each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.admission import Admission
from engine.request import Request, Stage
from kvferry.errors import Overloaded

if TYPE_CHECKING:
    from kvferry.config import SchedulerConfig
    from mem_cache.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class StepItem:
    """One sequence of a step: tokens [start, stop) of `request` are computed."""

    request: Request
    start: int
    stop: int


class Scheduler:
    """The requests of one engine, by stage, in order of arrival.

    A step decodes every decoding request and spends what is left of `chunk_tokens` on prompts,
    oldest first. The oldest waiting request is never overtaken, so it cannot starve.
    """

    def __init__(self, kv_cache: KVCache, config: SchedulerConfig) -> None:
        self._config = config
        self._admission = Admission(kv_cache)
        self._waiting: deque[Request] = deque()
        # Admitted requests hold KV. Dicts keep the order of admission and remove in O(1).
        self._prefilling: dict[int, Request] = {}
        self._decoding: dict[int, Request] = {}
        self._parked: dict[int, Request] = {}

    @property
    def running(self) -> int:
        """Requests that take part in steps."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        """Requests without KV."""
        return len(self._waiting)

    @property
    def uncomputed_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed."""
        started = sum(
            request.prompt_len - request.kv.committed_len
            for request in self._prefilling.values()
            if request.kv is not None
        )
        return started + sum(request.prompt_len for request in self._waiting)

    def enqueue(self, request: Request) -> None:
        """Accept a request. Raises `Overloaded` when the queue is full, `InvalidInput` when
        the request could never run here."""
        self._admission.check_fits_alone(request)
        if len(self._waiting) >= self._config.queue_max:
            raise Overloaded(f"worker queue of {self._config.queue_max} requests is full", 1.0)
        self._waiting.append(request)

    def check_fits(self, request: Request) -> None:
        """Raise `InvalidInput` for a request that an empty worker could not hold."""
        self._admission.check_fits_alone(request)

    def admit_inbound(self, request: Request) -> bool:
        """Reserve KV for a handoff into this worker. False: no space now."""
        if self.running + self._inbound >= self._config.running_max:
            return False
        if not self._admission.try_open(request, self._admitted(), inbound=True):
            return False
        request.move_to(Stage.INBOUND)
        self._parked[id(request)] = request
        return True

    def start_decoding(self, request: Request) -> None:
        """The prompt's KV is complete: decode from the next step on."""
        self._prefilling.pop(id(request), None)
        self._parked.pop(id(request), None)
        request.move_to(Stage.DECODING)
        self._decoding[id(request)] = request

    def hold(self, request: Request) -> None:
        """The prompt's KV is complete and stays for a handoff to read."""
        del self._prefilling[id(request)]
        request.move_to(Stage.HELD)
        self._parked[id(request)] = request

    def remove(self, request: Request) -> None:
        """Forget a request in any stage. Its KV is the caller's to release."""
        match request.stage:
            case Stage.WAITING:
                # A handoff's sink is WAITING without being queued until it is admitted.
                if request in self._waiting:
                    self._waiting.remove(request)
            case Stage.PREFILLING:
                del self._prefilling[id(request)]
            case Stage.DECODING:
                del self._decoding[id(request)]
            case Stage.INBOUND | Stage.HELD:
                del self._parked[id(request)]
            case Stage.ENDED:
                raise AssertionError(f"{request.id} has ended already")
        request.move_to(Stage.ENDED)

    def plan(self) -> tuple[list[StepItem], list[Request]]:
        """The next step, and the requests admitted for it."""
        items = [
            StepItem(request, request.num_tokens - 1, request.num_tokens)
            for request in self._decoding.values()
        ]
        budget = max(self._config.chunk_tokens - len(items), 1)
        for request in self._prefilling.values():
            if budget == 0:
                break
            item = _next_chunk(request, budget)
            budget -= item.stop - item.start
            items.append(item)
        admitted: list[Request] = []
        while budget > 0 and self._admit_oldest():
            request = next(reversed(self._prefilling.values()))
            admitted.append(request)
            item = _next_chunk(request, budget)
            budget -= item.stop - item.start
            items.append(item)
        return items, admitted

    @property
    def _inbound(self) -> int:
        return sum(request.stage is Stage.INBOUND for request in self._parked.values())

    def _admitted(self) -> list[Request]:
        return [*self._parked.values(), *self._decoding.values(), *self._prefilling.values()]

    def _admit_oldest(self) -> bool:
        if not self._waiting or self.running + self._inbound >= self._config.running_max:
            return False
        request = self._waiting[0]
        if not self._admission.try_open(request, self._admitted(), inbound=False):
            return False
        self._waiting.popleft()
        request.move_to(Stage.PREFILLING)
        self._prefilling[id(request)] = request
        return True


def _next_chunk(request: Request, budget: int) -> StepItem:
    assert request.kv is not None, f"{request.id} is prefilling without KV"
    start = request.kv.committed_len
    return StepItem(request, start, min(start + budget, request.prompt_len))
