"""Who is granted places, and who is not. The time and the fleet are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.errors import Overloaded
from kvferry.router_config import ServiceClassConfig, ServiceClassesConfig, TenantConfig
from router.admission import Admission
from router.admission_settings import AdmissionSettings
from router.fleet_capacity import FleetCapacity, PrefillLane
from router.request import ServiceClass
from router.tenants import RefusalReason
from router.ticket import Stage, Ticket
from router.work import Work

STANDARD = ServiceClass.STANDARD
IDLE = FleetCapacity(8, 1000, (PrefillLane(0, 100.0),))
NOBODY = FleetCapacity(0, None, ())


def settings(
    *, ttft_limit_s: float = 0.0, queue_max: int = 100, tenants: TenantConfig | None = None
) -> AdmissionSettings:
    of_class = ServiceClassConfig(queue_max=queue_max, ttft_limit_s=ttft_limit_s)
    classes = ServiceClassesConfig(of_class, of_class, of_class)
    return AdmissionSettings(classes, tenants or TenantConfig(), 50, step_tokens=128)


def ask(
    admission: Admission,
    now: float = 0.0,
    capacity: FleetCapacity = IDLE,
    *,
    tenant: str = "t",
    work: Work | None = None,
) -> Ticket:
    ticket = admission.arrive(STANDARD, tenant, now, capacity)
    try:
        admission.submit(ticket, work or Work(10, kv_tokens=10), now, capacity)
    except Overloaded:
        admission.end(ticket, now)
        raise
    return ticket


def grant(admission: Admission, now: float = 0.0, capacity: FleetCapacity = IDLE) -> list[Ticket]:
    """Those granted, as soon as workers have been asked for each one before."""
    granted: list[Ticket] = []
    while found := admission.decide(now, capacity).granted:
        for ticket in found:
            admission.dispatched(ticket)
        granted += found
    return granted


def test_places_are_sequences_and_come_back() -> None:
    admission = Admission(settings())
    tickets = [ask(admission, work=Work(10, sequences=3)) for _ in range(3)]
    assert grant(admission) == tickets[:2]
    assert admission.snapshot(IDLE).places_taken == 6
    admission.end(tickets[0], 1.0)
    assert grant(admission) == tickets[2:]
    for ticket in tickets[1:]:
        admission.end(ticket, 2.0)
    admission.check_invariants([])
    assert admission.snapshot(IDLE).places_taken == 0


def test_more_samples_than_places_run_alone() -> None:
    admission = Admission(settings())
    many, other = ask(admission, work=Work(10, sequences=16)), ask(admission)
    assert grant(admission) == [many]
    admission.end(many, 1.0)
    assert grant(admission) == [other]


def test_kv_is_a_limit_too() -> None:
    admission = Admission(settings())
    tickets = [ask(admission, work=Work(10, kv_tokens=600)) for _ in range(2)]
    assert grant(admission) == tickets[:1]
    assert grant(admission, capacity=replace(IDLE, kv_tokens=None)) == tickets[1:]


def test_prompts_go_when_a_worker_has_less_than_a_step() -> None:
    admission = Admission(settings())
    tickets = [ask(admission) for _ in range(3)]
    busy = replace(IDLE, lanes=(PrefillLane(400, 100.0), PrefillLane(128, 100.0)))
    # The first one goes whatever there is to do: nobody runs.
    assert grant(admission, capacity=busy) == tickets[:1]
    assert grant(admission, capacity=replace(IDLE, lanes=(PrefillLane(127, 1.0),))) == tickets[1:]


def test_what_is_on_its_way_to_a_worker_is_counted() -> None:
    admission = Admission(settings())
    first, second = (ask(admission, work=Work(200)) for _ in range(2))
    assert admission.decide(0.0, IDLE).granted == [first]
    assert admission.decide(0.0, IDLE).granted == []
    admission.dispatched(first)
    assert admission.decide(0.0, IDLE).granted == [second]


def test_without_workers_nobody_waits() -> None:
    admission = Admission(settings())
    tickets = [ask(admission, capacity=NOBODY) for _ in range(4)]
    assert grant(admission, capacity=NOBODY) == tickets


def test_a_full_queue_and_its_hint() -> None:
    admission = Admission(settings(queue_max=2))
    one = replace(IDLE, places=1)
    running = ask(admission, capacity=one)
    grant(admission, 0.0, one)
    for _ in range(2):
        ask(admission, 1.0, one)
    with pytest.raises(Overloaded, match="2 requests of class standard wait already"):
        ask(admission, 1.0, one)
    admission.end(running, 4.0)
    grant(admission, 4.0, one)
    ask(admission, 4.0, one)
    # A place is held for four seconds, there is one, and hints give out half of what there is.
    with pytest.raises(Overloaded) as caught:
        ask(admission, 4.0, one)
    assert caught.value.retry_after_s == 8.0
    assert admission.snapshot(one).classes[STANDARD].refused[RefusalReason.QUEUE_FULL] == 2


def test_a_queue_that_one_tenant_has_filled_is_not_full_for_another() -> None:
    admission = Admission(settings(queue_max=3))
    one = replace(IDLE, places=1)
    ask(admission, 0.0, one, tenant="flood")
    grant(admission, 0.0, one)
    flood = [ask(admission, 0.0, one, tenant="flood") for _ in range(3)]
    with pytest.raises(Overloaded):
        ask(admission, 0.0, one, tenant="flood")
    modest = ask(admission, 0.0, one, tenant="modest")
    ((displaced, error),) = admission.decide(0.0, one).refused
    assert displaced is flood[-1]
    assert str(error).startswith("3 requests of class standard wait already")
    # Two and one: to take one more would only turn it round.
    with pytest.raises(Overloaded):
        ask(admission, 0.0, one, tenant="modest")
    assert (flood[0].stage, modest.stage) == (Stage.WAITING, Stage.WAITING)


def test_some_places_are_kept_for_those_that_have_few() -> None:
    admission = Admission(settings())
    flood = [ask(admission, tenant="flood") for _ in range(12)]
    assert grant(admission) == flood[:8]
    for ticket in flood[:8]:
        admission.end(ticket, 1.0)
    other = ask(admission, tenant="other")
    assert len(grant(admission)) == 5 - 1 + 1
    flood = [ask(admission, tenant="flood") for _ in range(12)]
    assert other.stage is Stage.RUNNING
    assert len(grant(admission)) == 2
    late = ask(admission, tenant="other")
    assert grant(admission) == [late]


def test_a_limit_out_of_reach_is_refused_with_the_time_until_it_is_not() -> None:
    admission = Admission(settings(ttft_limit_s=2.0))
    ask(admission)
    grant(admission)
    busy = replace(IDLE, lanes=(PrefillLane(300, 100.0),))
    with pytest.raises(Overloaded, match=r"after 3\.1 s, the limit is 2 s") as caught:
        ask(admission, 0.0, busy)
    # An eighth of what one holds a place for, as far as is known: a second; for twice as long.
    assert caught.value.retry_after_s == pytest.approx(1.1 + 0.25)
    with pytest.raises(Overloaded) as caught:
        ask(admission, 0.0, busy)
    assert caught.value.retry_after_s == pytest.approx(1.1 + 0.5)
    fits = ask(admission, 0.0, replace(IDLE, lanes=(PrefillLane(180, 100.0),)))
    assert fits.stage is Stage.WAITING


BUSY = replace(IDLE, lanes=(PrefillLane(300, 100.0),))


def crowd(admission: Admission, now: float) -> None:
    """Five times what eight places can do in a second, all of it refused."""
    for _ in range(40):
        with pytest.raises(Overloaded):
            ask(admission, now, BUSY, tenant="flood")


@pytest.mark.parametrize(("crowds", "granted"), [(False, 7), (True, 4)])
def test_places_that_others_mostly_use_are_kept_from_who_crowds(crowds: bool, granted: int) -> None:
    admission = Admission(settings(ttft_limit_s=2.0))
    modest = [ask(admission, tenant="modest") for _ in range(2)]
    assert grant(admission) == modest
    if crowds:
        crowd(admission, 60.0)
    flood = [ask(admission, 60.0, tenant="flood") for _ in range(8)]
    for ticket in modest:
        admission.end(ticket, 60.0)
    # Two in the mean, and three deviations of that: seven of eight. But half is everybody's part.
    assert grant(admission, 60.0) == flood[:granted]


def test_who_crowds_is_passed_by_those_that_ask_for_little() -> None:
    admission = Admission(settings(ttft_limit_s=2.0))
    ask(admission, tenant="flood")
    grant(admission)
    crowd(admission, 0.0)
    assert ask(admission, 0.0, BUSY, tenant="other").goes_first
    # Some seconds later nobody knows any more that it asked for too much.
    assert not ask(admission, 9.0, tenant="third").goes_first


def test_one_refusal_does_not_make_a_modest_tenant_crowd() -> None:
    admission = Admission(settings(ttft_limit_s=2.0))
    ask(admission, tenant="flood")
    grant(admission)
    crowd(admission, 0.0)
    full = replace(BUSY, lanes=(PrefillLane(300, 100.0, first_tokens=300),))
    with pytest.raises(Overloaded):
        ask(admission, 0.0, full, tenant="other")
    assert ask(admission, 0.0, BUSY, tenant="other").goes_first


def test_a_flood_is_known_where_the_queue_is_full_too() -> None:
    admission = Admission(settings(queue_max=2))
    for _ in range(10):
        ask(admission, tenant="flood")
        grant(admission)
    for _ in range(30):
        with pytest.raises(Overloaded):
            admission.arrive(STANDARD, "flood", 0.0, IDLE)
    assert ask(admission, tenant="modest").goes_first


@pytest.mark.parametrize(
    "limits",
    [
        TenantConfig(tokens_per_minute=100.0),
        TenantConfig(requests_per_minute=2.0),
        TenantConfig(concurrent_max=2),
    ],
)
def test_what_a_tenant_may_not_ask_for_anyway_is_no_flood(limits: TenantConfig) -> None:
    admission = Admission(settings(tenants=limits))
    work = Work(10, kv_tokens=10, prompt_len=10, longest=50)
    for _ in range(2):
        ask(admission, tenant="flood", work=work)
    grant(admission)
    for _ in range(40):
        with pytest.raises(Overloaded):
            ask(admission, tenant="flood", work=work)
    # Of what the fleet can do, the two that were taken are little: nobody crowds.
    assert not ask(admission, tenant="other", work=work).goes_first


def test_tokens_of_a_request_without_room_come_back() -> None:
    admission = Admission(settings(queue_max=0, tenants=TenantConfig(tokens_per_minute=100.0)))
    busy = []
    for number in range(8):
        busy.append(ask(admission, tenant=f"t{number}"))
        grant(admission)
    for _ in range(3):
        with pytest.raises(Overloaded, match="wait already"):
            ask(admission, tenant="late", work=Work(10, prompt_len=10, longest=90))
    for ticket in busy:
        admission.end(ticket, 0.0)
    assert ask(admission, tenant="late", work=Work(10, prompt_len=10, longest=90))


def test_what_goes_first_does_not_wait_until_a_worker_is_free_for_another_prompt() -> None:
    admission = Admission(settings())
    # It had more than the flood, so it is not the head.
    large = ask(admission, tenant="other", work=Work(900))
    assert grant(admission) == [large]
    flood = [ask(admission, tenant="flood") for _ in range(90)]
    small = ask(admission, tenant="other")
    others = replace(IDLE, lanes=(PrefillLane(400, 100.0),))
    assert grant(admission, 0.0, others)[0] is small
    assert all(ticket.stage is Stage.WAITING for ticket in flood)


def test_what_waits_for_room_is_not_passed() -> None:
    """Or else a large request would wait for ever beside small ones."""
    admission = Admission(settings())
    running = [ask(admission, tenant="other", work=Work(10, kv_tokens=400)) for _ in range(2)]
    assert grant(admission) == running
    flood = [ask(admission, tenant="flood", work=Work(10, kv_tokens=400)) for _ in range(40)]
    small = ask(admission, tenant="other", work=Work(500, kv_tokens=10))
    assert grant(admission) == []
    admission.end(running[0], 0.0)
    assert grant(admission)[0] is flood[0]
    assert small.stage is not Stage.ENDED


def test_a_wait_ends_when_the_limit_has_become_impossible() -> None:
    admission = Admission(settings(ttft_limit_s=2.0))
    one = replace(IDLE, places=1)
    ask(admission, 0.0, one)
    grant(admission, 0.0, one)
    waiting = ask(admission, 0.0, one)
    # Its ten tokens take a tenth of a second.
    assert admission.next_limit() == pytest.approx(1.9)
    assert not admission.decide(1.89, one).refused
    ((ticket, error),) = admission.decide(1.91, one).refused
    assert ticket is waiting
    assert waiting.stage is Stage.ENDED
    assert "the limit is 2 s" in str(error)
    assert admission.next_limit() is None


def test_whoever_finds_nobody_is_taken_whatever_is_predicted() -> None:
    admission = Admission(settings(ttft_limit_s=0.1))
    slow = replace(IDLE, lanes=(PrefillLane(0, 1.0),))
    ticket = ask(admission, 0.0, slow)
    assert grant(admission, 0.0, slow) == [ticket]


def test_an_end_is_one() -> None:
    admission = Admission(settings())
    ticket = ask(admission)
    admission.end(ticket, 0.0)
    with pytest.raises(AssertionError, match="ends once"):
        admission.end(ticket, 0.0)


def test_what_was_not_used_comes_back_to_the_tenant() -> None:
    admission = Admission(settings(tenants=TenantConfig(tokens_per_minute=100.0)))
    ticket = ask(admission, work=Work(10, prompt_len=10, longest=90))
    with pytest.raises(Overloaded):
        ask(admission, work=Work(10, prompt_len=10, longest=90))
    grant(admission)
    admission.answered(ticket, 10, 5, 0.0)
    admission.end(ticket, 0.0)
    again = ask(admission, work=Work(10, prompt_len=10, longest=85))
    assert again.stage is Stage.WAITING
