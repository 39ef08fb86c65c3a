"""Handoffs between workers of several tensor-parallel ranks: heads are cut anew on the way.

Every pair of ranks that shares heads has a lane; the lanes of a session live and die together.
"""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from kv_transfer.events import ChunkTaken
from kvferry.config import HandoffConfig, TransportChoice
from kvferry.sampling import SamplingParams
from tests.support.handoff_pair import (
    PLAIN_USE,
    HandoffPair,
    expected_kv,
    fill_kv,
    prompt_of,
    read_kv,
    small_cache,
    small_layout,
    state_count,
)
from tests.support.memory_link import MemoryLinkFactory
from tests.support.waiting import wait_until

DEGREES = [(source, sink) for source in (1, 2, 4) for sink in (1, 2, 4)]
PAGE_SIZES = [(4, 4), (1, 16), (16, 1), (16, 4)]
LINKS = ["memory", "gloo", "shared_memory"]
PROMPT = prompt_of(24, seed=5)


def layout_of(page_size=4, heads=4):
    """Of a whole worker."""
    return dataclasses.replace(small_layout(page_size), num_kv_heads=heads)


def ranks_pair(ranks, pages=(4, 4), link="memory", heads=4):
    source, sink = (layout_of(page_size, heads) for page_size in pages)
    # Of the whole worker: where there are several ranks, a payload holds more tokens of a lane.
    buffer_bytes = 4 * source.bytes_per_token
    config = HandoffConfig(
        staging_buffer_bytes=buffer_bytes,
        staging_buffers=3,
        checksums=True,
        link_timeout_s=5.0,
        transport=TransportChoice.AUTO if link == "shared_memory" else TransportChoice.GLOO,
    )
    factories = {"gloo": MemoryLinkFactory(5.0, 3, buffer_bytes)} if link == "memory" else None
    return HandoffPair(
        layout=source, sink_layout=sink, config=config, factories=factories, ranks=ranks
    )


THREADS_S = 30.0
"""Other tests leave threads that a killed peer holds until the timeout of their link."""


@pytest.fixture
def make_pair():
    """As `ranks_pair`; afterwards everything must be idle and no thread of a link be left."""
    pairs = []

    def make(*arguments, **options):
        pairs.append(ranks_pair(*arguments, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        # Closed even if it is not idle: its threads would fail every test that follows.
        try:
            pair.assert_idle()
        finally:
            pair.close()
    wait_until("no link has a thread", lambda: not link_threads(), THREADS_S, state=link_threads)


def link_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("link-")]


def assert_bytes(worker, kv, prompt):
    length = len(prompt)
    expected = expected_kv(worker.kv_cache, prompt, 0, length)
    assert torch.equal(read_kv(worker.kv_cache, kv, 0, length), expected)


def check_two_prompts(pair, sink_page, lanes):
    """A prompt, and one that begins with it: the sink has whole pages of the beginning."""
    bytes_per_token = layout_of().bytes_per_token
    first, second = prompt_of(37, seed=1), prompt_of(90, seed=1)
    second[:37] = first
    for prompt, hits in ((first, 0), (second, 37 // sink_page * sink_page)):
        key = pair.run(f"r{len(prompt)}", prompt)
        usage = pair.decode.sink.adopted_usage[key]
        assert usage.decode_hit_tokens == hits
        assert usage.moved_bytes == (len(prompt) - hits) * bytes_per_token
        assert_bytes(pair.decode, pair.decode.sink.kvs[key], prompt)
        pair.decode.sink.release(key)
    (session,) = pair.decode.driver._hub._sessions
    assert len(session.lanes) == lanes
    assert pair.prefill.driver.counters["links_opened"] == 1


@pytest.mark.parametrize("pages", PAGE_SIZES, ids=str)
@pytest.mark.parametrize("ranks", DEGREES, ids=str)
@pytest.mark.parametrize("link", LINKS)
def test_kv_arrives_byte_for_byte(make_pair, link, ranks, pages):
    pair = make_pair(ranks, pages, link)
    check_two_prompts(pair, pages[1], lanes=max(ranks))


def test_what_lanes_report_in_another_order_than_they_counted_is_all_there(make_pair):
    """The report that ends a handoff comes first, those of the other lanes after its end."""
    pair, held = make_pair((4, 4)), []
    handlers = pair.decode.driver._handlers
    handle = handlers[ChunkTaken]

    def last_first(event):
        held.append(event)
        if event.taken.remaining == 0:
            while held:
                handle(held.pop())

    handlers[ChunkTaken] = last_first
    check_two_prompts(pair, sink_page=4, lanes=4)


@pytest.mark.parametrize("ranks", [(2, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("link", LINKS)
def test_degrees_need_not_divide_one_another(make_pair, link, ranks):
    pair = make_pair(ranks, (4, 16), link, heads=6)
    prompt = prompt_of(50)
    key = pair.run("r1", prompt)
    assert_bytes(pair.decode, pair.decode.sink.kvs[key], prompt)
    (session,) = pair.decode.driver._hub._sessions
    # Heads 0-1, 2 and 3, 4-5 go from or to different ranks.
    assert len(session.lanes) == 4
    pair.decode.sink.release(key)


def test_a_peer_whose_ranks_cut_a_head_is_refused(make_pair):
    pair = make_pair((2, 2))
    hub = pair.decode.driver._hub
    hub._local = dataclasses.replace(hub._local, ranks=3)
    key = pair.fetch("r1", PROMPT)
    pair.until(lambda: key in pair.decode.sink.errors)
    assert "4 heads on 3 ranks" in str(pair.decode.sink.errors[key])
    assert not pair.prefill.source.prompts


@pytest.mark.parametrize("ranks", [(1, 4), (4, 2), (2, 2)], ids=str)
def test_layers_leave_on_every_lane_while_the_step_still_computes(make_pair, ranks):
    pair = make_pair(ranks)
    prompt = prompt_of(64)
    key = pair.fetch("r1", prompt)
    source = pair.prefill.source
    pair.until(lambda: key in source.queue)
    source.schedule(key)
    pair.until(lambda: state_count(pair.prefill, "source_streaming") == 1)
    cache, kv = pair.prefill.kv_cache, source.kvs[key]
    fill_kv(cache, kv, prompt, 0, 64)
    for layers in range(1, cache.layout.num_layers):
        pair.prefill.driver.computing(key, 64, layers)
    pair.until(lambda: pair.decode.driver.counters["chunks_received"] >= max(ranks))
    cache.commit(kv, 64)
    pair.prefill.driver.computed(key, 64)
    source.finish(key)
    pair.until(lambda: key in source.ends)
    assert_bytes(pair.decode, pair.decode.sink.kvs[key], prompt)
    pair.decode.sink.release(key)


def stream_some(pair):
    """A handoff whose first 16 of 24 tokens may have left, on lanes that have carried others.

    A Gloo group whose peer goes away while it is built is held by torch for several timeouts.
    """
    pair.decode.sink.release(pair.run("before", prompt_of(9, seed=4)))
    key = pair.fetch("doomed", PROMPT)
    source = pair.prefill.source
    pair.until(lambda: key in source.queue)
    source.schedule(key)
    pair.until(lambda: state_count(pair.prefill, "source_streaming") == 1)
    source.compute(key, 16)
    return key


def assert_serves(pair):
    """The next handoff works, on the same session or a new one."""
    prompt = prompt_of(60, seed=6)
    key = pair.run("next", prompt)
    assert_bytes(pair.decode, pair.decode.sink.kvs[key], prompt)
    pair.decode.sink.release(key)


ENDS = [(1, 4), (4, 2), (2, 2)]


@pytest.mark.parametrize("ranks", ENDS, ids=str)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("side", ["source", "sink"])
def test_an_abort_closes_every_lane_of_that_handoff(make_pair, link, ranks, side):
    pair = make_pair(ranks, (4, 4), link)
    key = stream_some(pair)
    worker, host = {
        "source": (pair.prefill, pair.prefill.source),
        "sink": (pair.decode, pair.decode.sink),
    }[side]
    host.abort(key, "enough")
    # Local and immediate, whatever the lanes are doing.
    assert worker.kv_cache.accounts().is_idle
    assert worker.driver.handoffs_open() == 0
    other = pair.decode.sink.errors if side == "source" else pair.prefill.source.ends
    pair.until(lambda: key in other)
    assert "enough" in str(other[key])
    assert_serves(pair)
    assert pair.prefill.driver.counters["links_opened"] == 1


@pytest.mark.parametrize("ranks", ENDS, ids=str)
@pytest.mark.parametrize("link", LINKS)
def test_a_lost_session_ends_every_lane(make_pair, link, ranks):
    pair = make_pair(ranks, (16, 4), link)
    key = stream_some(pair)
    for session in list(pair.decode.driver._hub._sessions):
        session.close("cut by the test")
    pair.until(lambda: key in pair.decode.sink.errors and key in pair.prefill.source.ends)
    assert pair.decode.sink.errors[key].status.retryable
    pair.assert_idle()
    wait_until("lanes have ended", lambda: not link_threads(), THREADS_S, state=link_threads)
    assert_serves(pair)
    assert pair.decode.driver.counters["sessions_opened"] == 2


@pytest.mark.parametrize("lane", [0, 2, 3])
@pytest.mark.parametrize("side", ["source", "sink"])
@pytest.mark.parametrize("link", LINKS)
def test_the_death_of_one_lane_ends_its_generation_and_nothing_else(make_pair, link, side, lane):
    pair = make_pair((4, 2), (4, 4), link)
    key = stream_some(pair)
    cache = small_cache(layout_of(), ranks=2)
    other = type(pair.prefill)("prefill-1", 103, pair.loop, cache, pair.config, pair.factories)
    workers = (other, pair.prefill, pair.decode)
    # In the middle of another source's handoff ...
    spared = dataclasses.replace(key, source_incarnation=other.incarnation)
    pair.decode.sink.prompts[spared] = PROMPT
    pair.decode.driver.fetch(spared, other.as_source(), PROMPT, SamplingParams(), PLAIN_USE)
    pair._until(lambda: spared in other.source.queue, *workers)

    struck = {"source": pair.prefill, "sink": pair.decode}[side]
    session = next(session for session in struck.driver._hub._sessions if len(session.lanes) == 4)
    session._links._lanes[lane].end.close("killed by the test")

    pair._until(
        lambda: key in pair.decode.sink.errors and key in pair.prefill.source.ends, *workers
    )
    assert "link lost" in str(pair.decode.sink.errors[key])
    assert pair.decode.sink.errors[key].status.retryable
    for worker in (pair.prefill, pair.decode):
        assert worker.driver.counters["links_lost"] == 1
    # ... which goes on, and so does this pair on its next generation.
    other.source.serve(spared)
    pair._until(lambda: spared in other.source.ends, *workers)
    assert_bytes(pair.decode, pair.decode.sink.kvs[spared], PROMPT)
    pair.decode.sink.release(spared)
    assert_serves(pair)
    assert pair.prefill.driver.counters["sessions_opened"] == 1
    assert pair.prefill.driver.counters["links_opened"] == 2
    other.close()
