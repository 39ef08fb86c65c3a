"""Admission under anything: places are conserved, every request has one end, nobody starves."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.clock import ManualClock
from kvferry.errors import Overloaded
from kvferry.router_config import ServiceClassConfig, ServiceClassesConfig, TenantConfig
from router.admission import Admission
from router.admission_settings import AdmissionSettings
from router.fleet_capacity import FleetCapacity, PrefillLane
from router.request import ServiceClass
from router.ticket import Stage, Ticket
from router.work import Work

_TENANTS = TenantConfig(concurrent_max=4, requests_per_minute=30.0, tokens_per_minute=900.0)
_LIMITED = ServiceClassConfig(queue_max=4, ttft_limit_s=5.0)
_SETTINGS = AdmissionSettings(
    ServiceClassesConfig(_LIMITED, ServiceClassConfig(queue_max=5), _LIMITED), _TENANTS, 6, 64
)
_lanes = st.lists(
    st.builds(PrefillLane, st.integers(0, 200), st.sampled_from([0.0, 20.0, 100.0])), max_size=3
)
_numbers = st.integers(0, 1000)


class AdmissionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.admission = Admission(_SETTINGS)
        self.capacity = FleetCapacity(4, 300, (PrefillLane(0, 100.0),))
        self.tickets: list[Ticket] = []
        self.hints: list[float] = []
        self.told: list[Ticket] = []
        """Those of whose end a decision told."""
        self.accepted: dict[str, list[float]] = {}

    def _pick(self, number: int, *stages: Stage) -> Ticket | None:
        found = [ticket for ticket in self.tickets if ticket.stage in stages]
        return found[number % len(found)] if found else None

    @rule(service_class=st.sampled_from(ServiceClass), tenant=st.sampled_from("abc"))
    def arrive(self, service_class: ServiceClass, tenant: str) -> None:
        now = self.clock.now()
        try:
            ticket = self.admission.arrive(service_class, tenant, now, self.capacity)
        except Overloaded as error:
            self.hints.append(error.retry_after_s)
        else:
            self.tickets.append(ticket)
            self.accepted.setdefault(tenant, []).append(now)

    @rule(number=_numbers, prompt=st.integers(1, 100), sequences=st.integers(1, 6))
    def submit(self, number: int, prompt: int, sequences: int) -> None:
        ticket = self._pick(number, Stage.ARRIVED)
        if ticket is None:
            return
        answers = 10 * sequences
        work = Work(prompt, answers, sequences, prompt + answers, prompt, prompt + answers)
        try:
            self.admission.submit(ticket, work, self.clock.now(), self.capacity)
        except Overloaded as error:
            self.hints.append(error.retry_after_s)
            self._end(ticket)

    @rule()
    def decide(self) -> None:
        alone = not any(ticket.stage is Stage.RUNNING for ticket in self.tickets)
        decisions = self.admission.decide(self.clock.now(), self.capacity)
        assert all(ticket.stage is Stage.ENDED for ticket, _ in decisions.refused)
        told = [ticket for ticket, _ in decisions.refused]
        assert not any(ticket in self.told for ticket in told), "one end each"
        self.told += told
        assert not [t for t in self.tickets if t.stage is Stage.ENDED and t not in self.told]
        self.tickets = [ticket for ticket in self.tickets if ticket not in told]
        sequences = [t.work.sequences for t in self.tickets if t.stage is Stage.RUNNING]
        places = min(self.capacity.places, 6) or 6
        if decisions.granted and not (alone and len(sequences) == 1):
            # More samples than places run alone, and then nobody joins them.
            assert sum(sequences) <= places

    @rule(number=_numbers)
    def dispatched(self, number: int) -> None:
        ticket = self._pick(number, Stage.RUNNING)
        if ticket is not None:
            self.admission.dispatched(ticket)

    @rule(number=_numbers, tokens=st.integers(0, 5))
    def answered(self, number: int, tokens: int) -> None:
        ticket = self._pick(number, Stage.RUNNING)
        if ticket is not None:
            tokens = min(tokens, ticket.work.longest - ticket.work.prompt_len)
            self.admission.dispatched(ticket)
            self.admission.answered(ticket, ticket.work.prompt_tokens, tokens, self.clock.now())

    @rule(number=_numbers)
    def end(self, number: int) -> None:
        ticket = self._pick(number, Stage.ARRIVED, Stage.WAITING, Stage.RUNNING)
        if ticket is not None:
            self._end(ticket)

    @rule(seconds=st.floats(0.0, 100.0))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(places=st.integers(0, 8), kv=st.none() | st.integers(50, 500), lanes=_lanes)
    def the_fleet_changes(self, places: int, kv: int | None, lanes: list[PrefillLane]) -> None:
        self.capacity = FleetCapacity(places, kv, tuple(lanes))

    @rule()
    def everybody_who_waits_gets_an_answer(self) -> None:
        """Nobody starves: with the running ones ending, the queue becomes empty."""
        for ticket in [t for t in self.tickets if t.stage is Stage.ARRIVED]:
            self._end(ticket)
        for _ in range(len(self.tickets) + 1):
            self.decide()
            for ticket in [t for t in self.tickets if t.stage is Stage.RUNNING]:
                self._end(ticket)
        assert self.tickets == []
        assert self.admission.waiting == 0
        assert self.admission.snapshot(self.capacity).places_taken == 0

    @invariant()
    def sums_are_those_of_the_tickets(self) -> None:
        # One that had to make room has ended, of which the next decision will tell.
        self.admission.check_invariants([t for t in self.tickets if t.stage is not Stage.ENDED])
        assert all(0.1 <= hint <= 60.0 for hint in self.hints)
        for service_class in ServiceClass:
            waiting = [
                t
                for t in self.tickets
                if t.stage is Stage.WAITING and t.service_class is service_class
            ]
            # One that could begin at once is in the queue until somebody decides.
            assert len(waiting) <= _SETTINGS.of(service_class).queue_max + 1

    @invariant()
    def no_tenant_has_more_than_its_limits(self) -> None:
        now = self.clock.now()
        for tenant in "abc":
            own = [
                ticket
                for ticket in self.tickets
                if ticket.tenant.name == tenant and ticket.stage is not Stage.ENDED
            ]
            assert len(own) <= 4
            times = self.accepted.get(tenant, [])
            for first in times:
                within = [time for time in times if first <= time]
                assert len(within) <= 30 + (now - first) * 0.5 + 1e-6

    def _end(self, ticket: Ticket) -> None:
        self.admission.end(ticket, self.clock.now())
        self.tickets.remove(ticket)


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
