"""Whatever happens to a return, in whatever state: both workers hold nothing for it afterwards."""

from __future__ import annotations

import dataclasses

import pytest

from kv_transfer.protocol.messages import KvOffer
from kvferry.ids import Incarnation
from tests.support.handoff_pair import PLAIN_USE, state_count
from tests.support.return_pair import HELD, PROMPT, TURN, ReturnPair

STATES = ["offered", "requested", "holding", "receiving", "sent"]
FAULTS = [
    "taker gives way",
    "giver gives way",
    "session of the return lost",
    "both sessions lost",
    "link lost",
    "taker stops",
    "giver stops",
]


@pytest.fixture
def pair():
    workers = ReturnPair()
    yield workers
    workers.close()


def counters(worker):
    return worker.driver.counters


def drive_to(pair, state):
    """A return, each worker moving only as far as it has to."""
    key = pair.offer()
    taker, giver = pair.prefill, pair.decode
    if state == "offered":
        return key
    pair.until_only(taker, lambda: state_count(taker, "sink_requested"))
    if state == "requested":
        return key
    pair.until_only(giver, lambda: state_count(giver, "source_offered"))
    if state == "holding":
        return key
    pair.until_only(taker, lambda: state_count(taker, "sink_receiving"))
    if state == "receiving":
        return key
    pair.until_only(giver, lambda: state_count(giver, "source_completed"))
    return key


def on_session(pair, do):
    """To the session of the return, if there is one yet."""
    session = pair.prefill.driver._sink.session_with(pair.decode.as_source())
    if session is not None:
        do(session)


def strike(pair, fault, key):
    taker, giver = pair.prefill, pair.decode
    match fault:
        case "taker gives way":
            if key in pair.sink:
                pair.sink._give_up(key)
        case "giver gives way":
            pair.engines[giver].scheduler._give_way()
        case "session of the return lost":
            on_session(pair, lambda session: session.close("cut"))
        case "both sessions lost":
            taker.stop_server()
            giver.stop_server()
        case "link lost":
            on_session(pair, lambda session: session.close_link(1, "cut"))
        case "taker stops":
            taker.driver.close()
        case "giver stops":
            giver.driver.close()


def is_over(pair):
    return not (
        pair.prefill.driver.handoffs_open()
        or pair.decode.driver.handoffs_open()
        or counters(pair.decode)["offers_sent"]
        > counters(pair.prefill)["offers_taken"] + counters(pair.prefill)["offers_declined"]
    )


def test_an_answer_comes_back(pair):
    assert pair.came_back() == len(PROMPT)
    pair.offer()
    pair.until(lambda: counters(pair.decode)["source_closed"] == 1)
    assert counters(pair.prefill)["sink_adopted"] == 1
    pair.assert_nothing_held()
    assert pair.came_back() == HELD
    assert pair.content(pair.prefill) == pair.content(pair.decode)
    answer = pair.content(pair.prefill)[len(PROMPT) :]
    assert answer == [[token, at] for at, token in enumerate(TURN[:HELD])][len(PROMPT) :]
    moved = (HELD - len(PROMPT)) * pair.prefill.kv_cache.layout.bytes_per_token
    assert counters(pair.prefill)["bytes_received"] == moved == counters(pair.decode)["bytes_sent"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("state", STATES)
def test_both_end_with_nothing_held(pair, state, fault):
    key = drive_to(pair, state)
    strike(pair, fault, key)
    if fault.endswith(("lost", "stops")) and state == "offered":
        # The offer may or may not have arrived; whoever took it has ended.
        pair.until(lambda: not pair.decode.driver.handoffs_open())
        pair.until(lambda: not pair.prefill.driver.handoffs_open())
    else:
        pair.until(lambda: is_over(pair))
    pair.assert_nothing_held()
    # Whatever is cached now is right.
    held = pair.content(pair.prefill)
    assert held == pair.content(pair.decode)[: len(held)]


def test_the_next_return_comes_through(pair):
    key = drive_to(pair, "receiving")
    strike(pair, "taker gives way", key)
    pair.until(lambda: is_over(pair))
    pair.offer(pair.return_key("again"))
    pair.until(lambda: counters(pair.decode)["source_closed"] == 1)
    assert pair.came_back() == HELD
    pair.assert_nothing_held()


def test_the_giver_sends_what_it_still_has(pair):
    drive_to(pair, "requested")
    cache = pair.decode.kv_cache
    cache.allocator.free(cache.tree.evict(8))
    left = pair.engines[pair.decode].cached_len(TURN, PLAIN_USE.extra_key)
    pair.until(lambda: is_over(pair))
    assert pair.came_back() == max(left, len(PROMPT))
    pair.assert_nothing_held()


def test_offers_that_mean_nothing_are_counted_and_no_more(pair):
    key = pair.offer()
    pair.until(lambda: counters(pair.decode)["source_closed"] == 1)
    adopted = counters(pair.prefill)["sink_adopted"]
    # Again, and with a new key: it is all here.
    for name in ("turn", "turn", "other"):
        pair.offer(pair.return_key(name))
    pair.until(lambda: counters(pair.prefill)["offers_declined"] == 3)
    session = pair.decode.driver._sink.session_with(pair.prefill.as_source())
    for wrong in (
        dataclasses.replace(key, source_incarnation=Incarnation(1)),
        dataclasses.replace(key, sink_incarnation=Incarnation(1)),
    ):
        session.send(KvOffer(wrong, pair.decode.address, TURN, PLAIN_USE))
    pair.until(lambda: counters(pair.prefill)["illegal_messages"] == 2)
    assert counters(pair.prefill)["sink_adopted"] == adopted
    pair.assert_nothing_held()


def test_without_a_session_there_is_no_offer(pair):
    session = pair.decode.driver._sink.session_with(pair.prefill.as_source())
    session.close("cut")
    pair.until(lambda: counters(pair.decode)["sessions_lost"] == 1)
    pair.offer()
    assert counters(pair.decode)["offers_unsent"] == 1
    assert counters(pair.decode)["offers_sent"] == 0
    pair.assert_nothing_held()
