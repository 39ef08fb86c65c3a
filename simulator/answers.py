"""The answers that a simulated worker decodes, all of them a token per step."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from simulator.page_ids import AnswerPages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulator.held_request import HeldRequest


class Answers:
    """Who decodes, when each ends, and when it lacks a page: by numbers of steps."""

    def __init__(self, page_tokens: int) -> None:
        self.steps = 0
        """That have ended."""
        self.context = 0
        """Tokens that the next one reads."""
        self._page_tokens = page_tokens
        self._pages = AnswerPages()
        self._all: dict[HeldRequest, None] = {}
        # Heaps, of which entries that no longer hold are left out when they come up.
        self._ends_at: list[tuple[int, int, HeldRequest]] = []
        self._pages_at: list[tuple[int, int, HeldRequest]] = []

    def __len__(self) -> int:
        """How many there are."""
        return len(self._all)

    def __contains__(self, request: HeldRequest) -> bool:
        """Whether this one decodes."""
        return request in self._all

    def __iter__(self) -> Iterator[HeldRequest]:
        """In the order in which they came."""
        return iter(self._all)

    def join(self, request: HeldRequest, *, is_late: bool) -> None:
        """It takes part from the next step on; if it `is_late`, one is under way without it."""
        request.joined = self.steps + is_late
        request.ends = request.joined + request.longest - request.known
        self._all[request] = None
        self.context += request.known + 1 - is_late
        heapq.heappush(self._ends_at, (request.ends, request.arrival, request))
        self.want_page(request)

    def leave(self, request: HeldRequest) -> None:
        """It decodes no more; the pages that it filled have ids from now on."""
        del self._all[request]
        tokens = request.known + 1 + self.steps - request.joined
        self.context -= tokens
        request.computed = max(request.computed, tokens - 1)
        first, pages = request.known // self._page_tokens, tokens // self._page_tokens
        if pages > first:
            own = self._pages.take(pages - first + 1)
            request.ids = np.concatenate((request.ids[:first], own))

    def told(self, request: HeldRequest) -> int:
        """Of prompt and answer, the tokens that are known."""
        return request.known + max(0, self.steps - request.joined) + 1

    def passed(self, steps: int) -> None:
        """So many steps have ended."""
        self.steps += steps
        self.context += steps * len(self._all)

    def pop_ended(self) -> HeldRequest | None:
        """The next one that is complete; None if none is."""
        while self._ends_at and self._ends_at[0][0] <= self.steps:
            entry = heapq.heappop(self._ends_at)
            if self._holds(entry):
                return entry[2]
        return None

    def steps_to_end(self) -> int:
        """Until the first of them is complete, at least one."""
        while not self._holds(self._ends_at[0]):
            heapq.heappop(self._ends_at)
        return max(1, self._ends_at[0][0] - self.steps)

    def want_page(self, request: HeldRequest) -> None:
        """Note which step needs a page more than the request has."""
        tokens = request.held_kv.allocated_len * self._page_tokens
        request.page_due = request.joined + tokens - request.known + 1
        if request.page_due <= request.ends:
            heapq.heappush(self._pages_at, (request.page_due, request.arrival, request))

    def pop_page(self, step: int) -> HeldRequest | None:
        """The next one that needs a page by this step; None if none does."""
        while self._pages_at and self._pages_at[0][0] <= step:
            due, _, request = heapq.heappop(self._pages_at)
            if request.page_due == due and request in self._all:
                return request
        return None

    def lacks_page_within(self, steps: int) -> bool:
        """Whether somebody may need one by then."""
        return bool(self._pages_at) and self._pages_at[0][0] <= self.steps + steps

    def steps_to_page(self, steps: int) -> int:
        """So many, or those before somebody may need a page; at least one."""
        if not self._pages_at:
            return steps
        return min(steps, max(1, self._pages_at[0][0] - 1 - self.steps))

    def sit_out(self, request: HeldRequest) -> None:
        """It has no part in the next step, and needs its page for the one after it."""
        request.joined += 1
        request.ends += 1
        request.page_due += 1
        self.context -= 1
        heapq.heappush(self._ends_at, (request.ends, request.arrival, request))
        heapq.heappush(self._pages_at, (request.page_due, request.arrival, request))

    def _holds(self, entry: tuple[int, int, HeldRequest]) -> bool:
        step, _, request = entry
        return request.ends == step and request in self._all
