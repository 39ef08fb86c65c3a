"""Aborts and losses in every state: both workers return to their idle accounts."""

from __future__ import annotations

import pytest
import torch

from kvferry.sampling import SamplingParams
from tests.support.handoff_pair import (
    PLAIN_USE,
    HandoffPair,
    expected_kv,
    prompt_of,
    read_kv,
    small_cache,
    small_layout,
    state_count,
)

STATES = ["requested", "queued", "offered", "deferred", "streaming", "completed"]
PROMPT = prompt_of(24, seed=5)


@pytest.fixture
def pair():
    handoffs = HandoffPair()
    yield handoffs
    handoffs.close()


def source_state(pair, state):
    return state_count(pair.prefill, f"source_{state}") == 1


def sink_state(pair, state):
    return state_count(pair.decode, f"sink_{state}") == 1


def warm_up(pair):
    """Session and link are up, so that a handoff can go far with one engine standing still."""
    pair.decode.sink.release(pair.run("warm-up", prompt_of(9, seed=4)))


def drive_to(pair, state, name="r1"):
    """A handoff of 24 tokens, which fit the ring, in `state`."""
    source = pair.prefill.source
    if state == "deferred":
        pair.decode.sink.busy = 10**9
    key = pair.fetch(name, PROMPT)
    if state == "requested":
        return key
    pair.until(lambda: key in source.queue)
    if state == "queued":
        return key
    source.schedule(key)
    if state == "offered":
        assert source_state(pair, "offered")
        return key
    if state == "deferred":
        pair.until(lambda: source_state(pair, "deferred"))
        return key
    pair.until(lambda: source_state(pair, "streaming") and sink_state(pair, "receiving"))
    if state == "streaming":
        source.compute(key, 16)
        return key
    source.compute(key, 24)
    source.finish(key)
    pair.until_only(pair.prefill, lambda: source_state(pair, "completed"))
    return key


def assert_serves(pair):
    """The next handoff works, on the same session or a new one."""
    pair.decode.sink.busy = 0
    prompt = prompt_of(60, seed=6)
    key = pair.run("next", prompt)
    kv = pair.decode.sink.kvs[key]
    expected = expected_kv(pair.decode.kv_cache, prompt, 0, 60)
    assert torch.equal(read_kv(pair.decode.kv_cache, kv, 0, 60), expected)
    pair.decode.sink.release(key)


@pytest.mark.parametrize("state", STATES)
def test_the_sink_aborts(pair, state):
    warm_up(pair)
    key = drive_to(pair, state)
    pair.decode.sink.abort(key, "the client is gone")
    # Local and immediate: nothing of it is held, without a word from the source.
    assert pair.decode.kv_cache.accounts().is_idle
    assert pair.decode.driver.handoffs_open() == 0
    pair.until(lambda: key in pair.prefill.source.ends)
    assert "the client is gone" in pair.prefill.source.ends[key]
    pair.assert_idle()
    assert_serves(pair)
    pair.assert_idle()


@pytest.mark.parametrize("state", STATES[1:])
def test_the_source_aborts(pair, state):
    warm_up(pair)
    key = drive_to(pair, state)
    pair.prefill.source.abort(key, "the model failed")
    assert pair.prefill.kv_cache.accounts().is_idle
    assert pair.prefill.driver.handoffs_open() == 0
    pair.until(lambda: key in pair.decode.sink.errors or key in pair.decode.sink.adopted_usage)
    if key in pair.decode.sink.adopted_usage:
        # Everything had been sent. Whether the last payload, on the link, or the abort, on the
        # session, is there first is open; the sink has the prompt whole or not at all.
        assert state == "completed"
        kv = pair.decode.sink.kvs[key]
        expected = expected_kv(pair.decode.kv_cache, PROMPT, 0, 24)
        assert torch.equal(read_kv(pair.decode.kv_cache, kv, 0, 24), expected)
        pair.decode.sink.release(key)
    else:
        assert "the model failed" in str(pair.decode.sink.errors[key])
    pair.assert_idle()
    assert_serves(pair)
    pair.assert_idle()


@pytest.mark.parametrize("state", STATES)
def test_the_session_breaks(pair, state):
    warm_up(pair)
    key = drive_to(pair, state)
    for session in list(pair.decode.driver._hub._sessions):
        session.close("cut by the test")
    pair.until(lambda: key in pair.decode.sink.errors or key in pair.decode.sink.adopted_usage)
    pair.until(lambda: key in pair.prefill.source.ends or key not in pair.prefill.source.prompts)
    pair.until(lambda: pair.prefill.driver.handoffs_open() == 0)
    # Until the sink's engine has heard of the loss it would use the old session, and fail again.
    pair.until(lambda: pair.decode.driver.counters["sessions_lost"] == 1)
    if state == "completed":
        assert pair.prefill.source.ends[key] == "closed"
    elif key in pair.prefill.source.ends:
        assert "lost" in pair.prefill.source.ends[key]
    if key in pair.decode.sink.kvs:
        pair.decode.sink.release(key)
    else:
        assert pair.decode.sink.errors[key].status.retryable
    pair.assert_idle()
    assert_serves(pair)
    pair.assert_idle()


@pytest.mark.parametrize("state", STATES)
def test_the_source_dies(pair, state):
    warm_up(pair)
    key = drive_to(pair, state)
    pair.prefill.stop_server()
    # The source's engine says nothing more.
    pair.until_only(
        pair.decode,
        lambda: key in pair.decode.sink.errors or key in pair.decode.sink.adopted_usage,
    )
    if key in pair.decode.sink.kvs:
        pair.decode.sink.release(key)
    assert pair.decode.kv_cache.accounts().is_idle
    pair.decode.kv_cache.audit()


@pytest.mark.parametrize("state", STATES[3:])
def test_the_link_dies_and_the_next_generation_serves(pair, state):
    warm_up(pair)
    key = drive_to(pair, state)
    (session,) = pair.decode.driver._hub._sessions
    session.close_link(1, "cut by the test")
    pair.until(lambda: pair.prefill.driver.counters["links_lost"] == 1)
    source = pair.prefill.source
    if state == "deferred":
        # Nothing of it was on the link: it goes on with the next one.
        pair.decode.sink.busy = 0
        pair.until(lambda: source_state(pair, "streaming"))
        source.compute(key, 24)
        source.finish(key)
    pair.until(lambda: key in source.ends)
    pair.until(lambda: key in pair.decode.sink.errors or key in pair.decode.sink.adopted_usage)
    if key in pair.decode.sink.kvs:
        pair.decode.sink.release(key)
    pair.assert_idle()
    assert_serves(pair)
    assert pair.decode.driver.counters["sessions_opened"] == 1
    assert pair.prefill.driver.counters["links_opened"] == 2
    pair.assert_idle()


def test_other_sessions_do_not_notice_a_death(pair):
    """Two sources, one of which dies in the middle of a transfer."""
    cache = small_cache(small_layout())
    other = type(pair.prefill)("prefill-1", 103, pair.loop, cache, pair.config)
    doomed = drive_to(pair, "streaming")
    key = type(doomed)(doomed.request_id, doomed.attempt, other.incarnation, 202)
    pair.decode.sink.prompts[key] = PROMPT
    pair.decode.driver.fetch(key, other.as_source(), PROMPT, SamplingParams(), PLAIN_USE)
    pair._until(lambda: key in other.source.queue, other, pair.decode)
    pair.prefill.stop_server()
    other.source.serve(key)
    pair._until(lambda: doomed in pair.decode.sink.errors, other, pair.decode)
    pair._until(lambda: key in pair.decode.sink.adopted_usage, other, pair.decode)
    pair.decode.sink.release(key)
    assert pair.decode.kv_cache.accounts().is_idle
    other.close()


def test_close_ends_everything(pair):
    key = drive_to(pair, "streaming")
    pair.decode.driver.close()
    assert "stops" in str(pair.decode.sink.errors[key])
    assert pair.decode.kv_cache.accounts().is_idle
    pair.until(lambda: key in pair.prefill.source.ends)
    pair.assert_idle()
