"""Who is served next: classes by their weights, tenants of a class alike. Pure.

Start-time fair queueing on two levels, by tokens of work and not by requests. Every class, and
every tenant within a class, has a *clock* that moves on by what it is served, divided by its
weight. Served is the class whose clock is furthest behind, of it the tenant whose clock is, and of
that the oldest request. A class that comes back after a pause begins no further behind than the one
that is being served, and a tenant by its *credit*: so much it may catch up on, so that a few
requests at once of one who asks for little do not wait for those of one who asks for all. Credit
is what others were served of late while there was too little for all, a few requests at most: who
comes when there was enough went without nothing, and who is refused for lack of room asks for more
than there is. So nobody who waits is overtaken by much more than the others' shares.

What a request really cost is known when it ends; `settle` moves the clocks by the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from router.request import ServiceClass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from router.work import Work

ItemT = TypeVar("ItemT")

_CREDIT_REQUESTS = 8
"""Of usual size: what a tenant may catch up on at most."""
_AHEAD_REQUESTS = 6
"""Of usual size: who has more than that before it is not only a little busier than another one."""
_USUAL_WEIGHT = 0.05
"""Of the latest request in the mean of sizes."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What will be served before a request."""

    prompt_tokens: float = 0.0
    sequences: float = 0.0

    def __add__(self, other: Ahead) -> Ahead:
        return Ahead(self.prompt_tokens + other.prompt_tokens, self.sequences + other.sequences)


@dataclass(slots=True, eq=False)
class _Sum:
    """Of everything that waits in one place."""

    tokens: int = 0
    prompt_tokens: int = 0
    sequences: int = 0

    def add(self, work: Work, sign: int) -> None:
        self.tokens += sign * work.tokens
        self.prompt_tokens += sign * work.prompt_tokens
        self.sequences += sign * work.sequences

    def share(self, tokens: float) -> Ahead:
        """What goes first of this when `tokens` of it do."""
        part = min(1.0, max(0.0, tokens) / self.tokens) if self.tokens else 0.0
        return Ahead(part * self.prompt_tokens, part * self.sequences)


@dataclass(slots=True, eq=False)
class _Tenant(Generic[ItemT]):
    clock: float
    items: dict[ItemT, Work] = field(default_factory=dict)
    """In order of arrival."""
    waiting: _Sum = field(default_factory=_Sum)

    @property
    def end(self) -> float:
        """Where the clock will stand when all that waits has been served."""
        return self.clock + self.waiting.tokens


@dataclass(slots=True, eq=False)
class _Class(Generic[ItemT]):
    weight: float
    clock: float = 0.0
    served_at: float = 0.0
    """Where the clock of the tenant served last stood before."""
    usual_tokens: float = 0.0
    """Of a request, lately."""
    credit_tokens: float = 0.0
    """Served of late while others had to wait, less what was when nobody had to."""
    tenants: dict[str, _Tenant[ItemT]] = field(default_factory=dict)
    waiting: _Sum = field(default_factory=_Sum)
    count: int = 0

    def backlogged(self) -> Iterator[tuple[str, _Tenant[ItemT]]]:
        return ((name, tenant) for name, tenant in self.tenants.items() if tenant.items)

    @property
    def credit_max(self) -> float:
        """Tokens."""
        return _CREDIT_REQUESTS * self.usual_tokens

    def begin_of(self, name: str, credit_tokens: float) -> float:
        """Where the clock of a tenant with that credit stands if it had something to wait now."""
        tenant = self.tenants.get(name)
        least = self.served_at - credit_tokens
        if tenant is None:
            return least
        return tenant.clock if tenant.items else max(tenant.clock, least)

    def earn_credit(self, tokens: float) -> None:
        """So much was served while there was too little for all; below 0: enough."""
        self.credit_tokens = min(max(self.credit_tokens + tokens, 0.0), self.credit_max)


class FairQueue(Generic[ItemT]):
    """Requests that wait, of every class and tenant."""

    def __init__(self, weights: Mapping[ServiceClass, float]) -> None:
        self._classes: dict[ServiceClass, _Class[ItemT]] = {
            service_class: _Class(weights[service_class]) for service_class in ServiceClass
        }
        self._served_at = 0.0

    def __len__(self) -> int:
        return sum(entry.count for entry in self._classes.values())

    def count(self, service_class: ServiceClass) -> int:
        """Requests of a class that wait."""
        return self._classes[service_class].count

    def count_of(self, service_class: ServiceClass, tenant: str) -> int:
        """Requests of one tenant in a class that wait."""
        flow = self._classes[service_class].tenants.get(tenant)
        return 0 if flow is None else len(flow.items)

    def most_waiting(self, service_class: ServiceClass) -> str | None:
        """The tenant that has most requests waiting in a class; None if none waits."""
        flows = self._classes[service_class].backlogged()
        return max(flows, key=lambda named: len(named[1].items), default=(None, None))[0]

    def newest(self, service_class: ServiceClass, tenant: str) -> ItemT:
        """The request of a tenant that came last, of those that wait."""
        return next(reversed(self._classes[service_class].tenants[tenant].items))

    def push(self, item: ItemT, service_class: ServiceClass, tenant: str, work: Work) -> None:
        """`item` waits behind those of its tenant."""
        entry = self._classes[service_class]
        if entry.count == 0:
            entry.clock = max(entry.clock, self._served_at)
        begin = entry.begin_of(tenant, entry.credit_tokens)
        flow = entry.tenants.setdefault(tenant, _Tenant(begin))
        assert item not in flow.items, "a request waits once"
        flow.clock = begin
        flow.items[item] = work
        flow.waiting.add(work, 1)
        entry.waiting.add(work, 1)
        entry.count += 1

    def remove(self, item: ItemT, service_class: ServiceClass, tenant: str) -> None:
        """`item` waits no more, and was not served."""
        entry = self._classes[service_class]
        flow = entry.tenants[tenant]
        work = flow.items.pop(item)
        flow.waiting.add(work, -1)
        entry.waiting.add(work, -1)
        entry.count -= 1

    def head(self, may_go: Callable[[str], bool]) -> ItemT | None:
        """Who is next, of the tenants that `may_go`; None if nobody is."""
        for entry in sorted(self._classes.values(), key=lambda each: each.clock):
            flows = [flow for name, flow in entry.backlogged() if may_go(name)]
            if flows:
                return next(iter(min(flows, key=lambda flow: flow.clock).items))
        return None

    def serve(
        self, item: ItemT, service_class: ServiceClass, tenant: str, *, is_crowded: bool = False
    ) -> None:
        """Take `item` out, at the cost of its class and tenant. `is_crowded`: there is too little
        for all, although nobody else may wait."""
        entry = self._classes[service_class]
        flow = entry.tenants[tenant]
        work = flow.items[item]
        # Never back: refunds may have put a clock behind where another one was served.
        entry.served_at = max(entry.served_at, flow.clock)
        self._served_at = max(self._served_at, entry.clock)
        usual = entry.usual_tokens or work.tokens
        entry.usual_tokens = usual + _USUAL_WEIGHT * (work.tokens - usual)
        self.remove(item, service_class, tenant)
        self.settle(service_class, tenant, work.tokens)
        entry.earn_credit(work.tokens if entry.count or is_crowded else -work.tokens)

    def settle(self, service_class: ServiceClass, tenant: str, tokens: int) -> None:
        """Charge `tokens` more, or fewer if negative, than was charged so far."""
        entry = self._classes[service_class]
        entry.clock += tokens / entry.weight
        flow = entry.tenants.get(tenant)
        if flow is not None:
            flow.clock += tokens

    def forfeit(self, service_class: ServiceClass, tenant: str) -> None:
        """A tenant was refused for lack of room: it has nothing to catch up on."""
        entry = self._classes[service_class]
        flow = entry.tenants.get(tenant)
        if flow is not None:
            flow.clock = max(flow.clock, entry.served_at)

    def goes_first(self, service_class: ServiceClass, tenant: str) -> bool:
        """Whether somebody else has so much more waiting than this tenant that what it waits for is
        the other's excess: the end of what another one of the class has waiting is further ahead
        than credit alone can put it, or a class of less weight has so much waiting."""
        entry = self._classes[service_class]
        own = entry.tenants.get(tenant)
        if own is not None and own.waiting.tokens > _AHEAD_REQUESTS * entry.usual_tokens:
            return False
        far = entry.begin_of(tenant, entry.credit_tokens) + _AHEAD_REQUESTS * entry.usual_tokens
        return any(flow is not own and flow.end > far for _, flow in entry.backlogged()) or any(
            other.weight < entry.weight
            and other.waiting.tokens > _AHEAD_REQUESTS * other.usual_tokens
            for other in self._classes.values()
        )

    def forget(self, tenant: str) -> None:
        """Nothing of this tenant waits or runs, and it owes nothing any more."""
        for entry in self._classes.values():
            flow = entry.tenants.pop(tenant, None)
            assert flow is None or not flow.items, "who waits is not forgotten"

    def ahead_of_new(self, service_class: ServiceClass, tenant: str) -> Ahead:
        """What would be served before a request that came now, if nobody came after it."""
        entry = self._classes[service_class]
        own = entry.tenants.get(tenant)
        end = entry.begin_of(tenant, entry.credit_tokens) + (
            own.waiting.tokens if own is not None else 0
        )
        ahead, tokens = Ahead(), 0.0
        for _, flow in entry.backlogged():
            before = min(flow.waiting.tokens, max(0.0, end - flow.clock))
            tokens += before
            ahead += flow.waiting.share(before)
        begin = entry.clock if entry.count else max(entry.clock, self._served_at)
        class_end = begin + tokens / entry.weight
        for other in self._classes.values():
            if other is not entry:
                ahead += other.waiting.share((class_end - other.clock) * other.weight)
        return ahead
