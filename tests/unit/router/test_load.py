from __future__ import annotations

import pytest

from kvferry.accounts import KvAccounts, WorkerLoad
from kvferry.ids import WorkerId
from router.load import SLOTS_UNKNOWN, LoadBook, Loads

P, D = WorkerId("p"), WorkerId("d")
ACCOUNTS = KvAccounts(900, 50, 50, 0, 0, 1000, 0, 0, 64)


def book() -> LoadBook:
    loads = LoadBook()
    loads.add(P)
    loads.add(D)
    return loads


def of(loads: LoadBook, worker: WorkerId) -> Loads:
    return loads.loads(loads.rows_of((worker,)))


def is_unknown(load: Loads) -> bool:
    counts, rates = load.counts[0].tolist(), load.rates[0].tolist()
    return counts == [0, 0, 0, 0, SLOTS_UNKNOWN, 0, 0] and rates == [0.0, 0.0, float("-inf")]


def send(loads: LoadBook, now: float, tokens: int = 100, kv_tokens: int = 120):
    return loads.dispatch(now, prefill=P, decode=D, prefill_tokens=tokens, kv_tokens=kv_tokens)


def test_nothing_is_known_of_a_new_worker() -> None:
    assert is_unknown(of(book(), P))


def test_a_dispatch_counts_at_once() -> None:
    loads = book()
    send(loads, 1.0)
    send(loads, 1.0, tokens=50)
    assert of(loads, P).prefill_tokens == 150
    assert of(loads, P).sequences == 0
    assert of(loads, D).sequences == 2
    assert of(loads, D).prefill_tokens == 0


def test_a_prompt_that_goes_first_finds_only_those_before_it() -> None:
    loads = book()
    send(loads, 1.0)
    first = loads.dispatch(
        1.0, prefill=P, decode=D, prefill_tokens=30, kv_tokens=40, goes_first=True
    )
    assert (of(loads, P).prefill_tokens, of(loads, P).first_tokens) == (130, 30)
    # No report tells prompts apart, so this router counts its own until they are computed.
    loads.report(P, 2.0, WorkerLoad(waiting_tokens=130), ACCOUNTS)
    found = of(loads, P).for_first()
    assert (found.prefill_tokens, of(loads, P).prefill_tokens) == (30, 130)
    loads.prefilled(first)
    assert of(loads, P).for_first().prefill_tokens == 0
    loads.end(first)
    assert of(loads, P).first_tokens == 0


def test_a_later_report_takes_its_place() -> None:
    loads = book()
    send(loads, 1.0)
    loads.report(P, 2.0, WorkerLoad(waiting_tokens=70, prefill_tokens_per_s=500.0), ACCOUNTS)
    estimate = of(loads, P)
    assert (estimate.prefill_tokens, estimate.prefill_tokens_per_s) == (70, 500.0)


def test_a_report_asked_for_before_the_dispatch_does_not() -> None:
    loads = book()
    send(loads, 1.0)
    loads.report(P, 0.5, WorkerLoad(waiting_tokens=70), ACCOUNTS)
    assert of(loads, P).prefill_tokens == 170


def test_the_first_token_ends_the_prompts_share() -> None:
    loads = book()
    ticket = send(loads, 1.0)
    loads.prefilled(ticket)
    assert of(loads, P).prefill_tokens == 0
    assert of(loads, D).sequences == 1


def test_work_that_was_reported_and_ended_since_is_taken_off() -> None:
    loads = book()
    ticket = send(loads, 1.0)
    loads.report(P, 2.0, WorkerLoad(waiting_tokens=130), ACCOUNTS)
    loads.report(D, 2.0, WorkerLoad(running=3), ACCOUNTS)
    loads.end(ticket)
    assert of(loads, P).prefill_tokens == 30
    assert of(loads, D).sequences == 2


def test_estimates_never_go_below_zero() -> None:
    loads = book()
    ticket = send(loads, 1.0)
    loads.report(P, 2.0, WorkerLoad(waiting_tokens=10), ACCOUNTS)
    loads.report(D, 2.0, WorkerLoad(running=0), ACCOUNTS)
    loads.end(ticket)
    assert of(loads, P).prefill_tokens == 0
    assert of(loads, D).sequences == 0


def test_slots_shrink_by_what_was_sent_since() -> None:
    loads = book()
    loads.report(D, 1.0, WorkerLoad(), ACCOUNTS)
    assert of(loads, D).slots_available == 950
    send(loads, 2.0)
    assert of(loads, D).slots_available == 830
    assert of(loads, D).slots_total == 1000


def test_one_worker_in_both_parts_counts_once_each() -> None:
    loads = book()
    ticket = loads.dispatch(1.0, prefill=D, decode=D, prefill_tokens=9, kv_tokens=9)
    assert (of(loads, D).prefill_tokens, of(loads, D).sequences) == (9, 1)
    loads.end(ticket)
    assert is_unknown(of(loads, D))


def test_a_worker_that_came_back_has_no_load_of_its_past() -> None:
    loads = book()
    ticket = send(loads, 1.0)
    loads.add(D)
    assert of(loads, D).sequences == 0
    loads.end(ticket)
    assert of(loads, D).sequences == 0
    assert is_unknown(of(loads, D))
    loads.remove(D)
    assert loads.active_tokens(D) == 0


def test_each_sample_is_a_sequence() -> None:
    loads = book()
    ticket = loads.dispatch(
        1.0, prefill=P, decode=D, prefill_tokens=100, kv_tokens=120, sequences=4
    )
    assert (of(loads, P).prefill_tokens, of(loads, D).sequences) == (100, 4)
    loads.report(D, 2.0, WorkerLoad(running=6), ACCOUNTS)
    loads.end(ticket)
    assert of(loads, D).sequences == 2


def test_an_attempt_ends_once() -> None:
    loads = book()
    ticket = send(loads, 1.0)
    loads.end(ticket)
    with pytest.raises(AssertionError):
        loads.end(ticket)
