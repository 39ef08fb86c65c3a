"""Two drivers over real gRPC sessions and real Gloo links."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from kv_transfer import session_hub
from kv_transfer.events import MessageCame
from kv_transfer.protocol.messages import LinkSignal
from kvferry.config import HandoffConfig
from kvferry.errors import ConfigError, ErrorKind, InternalError, InvalidInput, Overloaded
from kvferry.generation import OutputToken, TokenLogprobs
from kvferry.ids import Incarnation
from kvferry.sampling import SamplingParams
from tests.support.handoff_pair import (
    NO_KEY,
    PLAIN_USE,
    HandoffPair,
    expected_kv,
    fill_kv,
    prompt_of,
    read_kv,
    small_layout,
    state_count,
)
from tests.support.memory_link import MemoryLinkFactory


@pytest.fixture
def pair():
    handoffs = HandoffPair()
    yield handoffs
    handoffs.close()


def assert_bytes(worker, kv, prompt) -> None:
    length = len(prompt)
    expected = expected_kv(worker.kv_cache, prompt, 0, length)
    assert torch.equal(read_kv(worker.kv_cache, kv, 0, length), expected)


def test_kv_arrives_byte_for_byte_and_is_committed(pair):
    prompt = prompt_of(50)
    key = pair.run("r1", prompt)

    sink = pair.decode.sink
    kv = sink.kvs[key]
    assert not kv.inbound
    assert kv.committed_len == 50
    assert_bytes(pair.decode, kv, prompt)
    assert sink.log == ["reserved", "first tokens", "adopted"]
    assert pair.prefill.source.ends[key] == "closed"
    usage = sink.adopted_usage[key]
    assert usage.moved_tokens == 50
    assert usage.decode_hit_tokens == 0
    assert usage.moved_bytes == 50 * pair.decode.kv_cache.layout.bytes_per_token
    assert usage.handoff_ms > 0
    assert pair.decode.driver.link_bytes_per_s > 0
    assert pair.prefill.driver.link_bytes_per_s == 0, "nothing comes in at the source"
    sink.release(key)
    pair.assert_idle()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_length_around_a_page(page_size):
    pair = HandoffPair(layout=small_layout(page_size))
    for length in sorted({1, max(1, page_size - 1), page_size, page_size + 1, 3 * page_size}):
        prompt = prompt_of(length, seed=length)
        key = pair.run(f"r{length}", prompt)
        assert_bytes(pair.decode, pair.decode.sink.kvs[key], prompt)
        pair.decode.sink.release(key)
    pair.assert_idle()
    pair.close()


def test_only_the_missing_suffix_moves(pair):
    prompt = prompt_of(40)
    pair.decode.sink.release(pair.run("first", prompt[:21]))
    key = pair.run("second", prompt)

    usage = pair.decode.sink.adopted_usage[key]
    # 21 tokens are five pages of four at the sink, and the same at the source.
    assert usage.decode_hit_tokens == 20
    assert usage.prefill_hit_tokens == 20
    assert usage.moved_tokens == 20
    assert_bytes(pair.decode, pair.decode.sink.kvs[key], prompt)
    pair.decode.sink.release(key)
    pair.assert_idle()


def test_a_full_hit_runs_the_whole_course_without_chunks(pair):
    prompt = prompt_of(40)
    pair.decode.sink.release(pair.run("first", prompt))
    chunks = pair.decode.driver.counters["chunks_received"]
    key = pair.run("second", prompt)

    usage = pair.decode.sink.adopted_usage[key]
    assert usage.decode_hit_tokens == 40
    assert usage.moved_tokens == usage.moved_bytes == 0
    assert pair.decode.driver.counters["chunks_received"] == chunks
    assert pair.prefill.source.ends[key] == "closed"
    assert pair.decode.sink.log[-3:] == ["reserved", "first tokens", "adopted"]
    pair.decode.sink.release(key)
    pair.assert_idle()


def test_chunks_leave_while_the_prompt_is_still_computed(pair):
    key = pair.fetch("r1", prompt_of(64))
    source = pair.prefill.source
    pair.until(lambda: key in source.queue)
    source.schedule(key)
    source.compute(key, 32)
    # More than the ring of 3 x 8 tokens holds: credit has come back meanwhile.
    pair.until(lambda: pair.decode.driver.counters["chunks_received"] == 4)
    assert key not in pair.decode.sink.adopted_usage
    source.compute(key, 64)
    source.finish(key)
    pair.until(lambda: key in source.ends)
    pair.decode.sink.release(key)
    pair.assert_idle()


def test_nothing_is_reserved_before_the_source_is_ready(pair):
    key = pair.fetch("r1", prompt_of(20))
    pair.until(lambda: key in pair.prefill.source.queue)
    assert pair.decode.kv_cache.accounts().is_idle
    pair.decode.sink.abort(key, "test ends")
    pair.until(lambda: key in pair.prefill.source.ends)
    pair.assert_idle()


def test_a_busy_sink_is_asked_again_while_the_source_computes(pair):
    pair.decode.sink.busy = 2
    prompt = prompt_of(30)
    key = pair.run("r1", prompt)
    assert pair.decode.sink.log == ["busy", "busy", "reserved", "first tokens", "adopted"]
    assert_bytes(pair.decode, pair.decode.sink.kvs[key], prompt)
    pair.decode.sink.release(key)
    pair.assert_idle()


def test_a_sink_without_slots_is_busy_until_some_are_released(pair):
    blocker = pair.decode.kv_cache.open("blocker", prompt_of(200, seed=9), "")
    pair.decode.kv_cache.extend(blocker, 200)
    other = pair.decode.kv_cache.open("other", prompt_of(250, seed=8), "")
    pair.decode.kv_cache.extend(other, 250)
    key = pair.fetch("r1", prompt_of(100))
    pair.until(lambda: key in pair.prefill.source.queue)
    pair.prefill.source.serve(key)
    pair.until(lambda: state_count(pair.prefill, "source_deferred"))
    pair.decode.kv_cache.release(blocker, None)
    pair.until(lambda: key in pair.decode.sink.adopted_usage and key in pair.prefill.source.ends)
    pair.decode.kv_cache.release(other, None)
    pair.decode.sink.release(key)
    pair.assert_idle()


def test_many_handoffs_share_one_link(pair):
    prompts = {f"r{n}": prompt_of(30 + n, seed=n) for n in range(8)}
    keys = {pair.fetch(name, prompt): prompt for name, prompt in prompts.items()}
    source, sink = pair.prefill.source, pair.decode.sink
    pair.until(lambda: len(source.queue) == 8)
    for key in keys:
        source.schedule(key)
    for stop in (16, 30):
        for key in keys:
            source.compute(key, stop)
    for key, prompt in keys.items():
        source.compute(key, len(prompt))
        source.finish(key)
    pair.until(lambda: len(sink.adopted_usage) == 8 and len(source.ends) == 8)
    for key, prompt in keys.items():
        assert_bytes(pair.decode, sink.kvs[key], prompt)
        sink.release(key)
    for worker in (pair.prefill, pair.decode):
        assert worker.driver.counters["links_opened"] == 1
        assert worker.driver.counters["sessions_opened"] == 1
    pair.assert_idle()


def test_the_first_token_keeps_its_logprobs(pair):
    key = pair.fetch("r1", prompt_of(9))
    source = pair.prefill.source
    pair.until(lambda: key in source.queue)
    source.schedule(key)
    source.compute(key, 9)
    token = OutputToken(5, TokenLogprobs(5, -0.25, ((5, -0.25), (6, -1.5))))
    source.finish(key, token)
    pair.until(lambda: key in source.ends)
    assert pair.decode.sink.tokens[key] == (token,)
    pair.decode.sink.release(key)


@pytest.mark.parametrize(
    ("refusal", "kind", "retryable"),
    [
        (Overloaded("the queue is full", 1.0), ErrorKind.OVERLOADED, True),
        (InvalidInput("prompt", "is too long"), ErrorKind.INVALID_INPUT, False),
        (InternalError("out of luck"), ErrorKind.UNAVAILABLE, True),
    ],
)
def test_a_source_that_refuses_fails_the_handoff_at_once(pair, refusal, kind, retryable):
    pair.prefill.source.refusal = refusal
    key = pair.fetch("r1", prompt_of(9))
    pair.until(lambda: key in pair.decode.sink.errors)
    error = pair.decode.sink.errors[key]
    assert error.kind is kind
    assert error.status.retryable is retryable
    assert str(error).endswith(f"refused: {refusal}")
    if kind is ErrorKind.OVERLOADED:
        assert error.retry_after_s == 1.0
    pair.assert_idle()


def test_another_incarnation_is_refused(pair):
    stale = pair.prefill.as_source()
    pair.prefill.close()
    pair.prefill.driver = None
    restarted = type(pair.prefill)("prefill-0", 102, pair.loop, pair.prefill.kv_cache, pair.config)
    pair.prefill = restarted
    key = pair.key("r1")
    key = type(key)(key.request_id, key.attempt, stale.incarnation, key.sink_incarnation)
    pair.decode.sink.prompts[key] = prompt_of(9)
    source = type(stale)(stale.worker_id, restarted.address, stale.incarnation)
    pair.decode.driver.fetch(key, source, prompt_of(9), SamplingParams(), PLAIN_USE)
    pair.until(lambda: key in pair.decode.sink.errors)
    assert "incarnation" in str(pair.decode.sink.errors[key])
    assert not restarted.source.prompts


@pytest.mark.parametrize("side", ["source_incarnation", "sink_incarnation"])
def test_a_key_that_names_another_incarnation_is_refused(pair, side):
    key = dataclasses.replace(pair.key("r1"), **{side: Incarnation(999)})
    pair.decode.sink.prompts[key] = prompt_of(9)
    source = pair.prefill.as_source()
    pair.decode.driver.fetch(key, source, prompt_of(9), SamplingParams(), PLAIN_USE)
    pair.until(lambda: key in pair.decode.sink.errors)
    assert "3e7" in str(pair.decode.sink.errors[key])
    assert not pair.prefill.source.prompts
    pair.assert_idle()


@pytest.mark.parametrize(("source_page", "sink_page"), [(1, 16), (4, 16), (16, 4), (16, 1)])
def test_pages_may_differ_in_size(source_page, sink_page):
    pair = HandoffPair(layout=small_layout(source_page), sink_layout=small_layout(sink_page))
    first, second = prompt_of(37, seed=1), prompt_of(50, seed=1)
    second[:37] = first
    for prompt, hits in ((first, 0), (second, 37 // sink_page * sink_page)):
        key = pair.run(f"r{len(prompt)}", prompt)
        assert pair.decode.sink.adopted_usage[key].decode_hit_tokens == hits
        assert_bytes(pair.decode, pair.decode.sink.kvs[key], prompt)
        pair.decode.sink.release(key)
    pair.assert_idle()
    pair.close()


def test_an_unreachable_source_fails_within_the_deadline(pair, monkeypatch):
    monkeypatch.setattr(session_hub, "SESSION_CONNECT_TIMEOUT_S", 0.2)
    pair.prefill.stop_server()
    key = pair.fetch("r1", prompt_of(9))
    pair.until(lambda: key in pair.decode.sink.errors)
    assert "no connection" in str(pair.decode.sink.errors[key])


def test_doubled_messages_change_nothing(pair):
    """Signals of a link apart, which only a broken transport could double."""
    for worker in (pair.prefill, pair.decode):
        put = worker.driver._hub._links.post

        def twice(event, put=put):
            put(event)
            if isinstance(event, MessageCame) and not isinstance(event.message, LinkSignal):
                put(event)

        worker.driver._hub._links = dataclasses.replace(worker.driver._hub._links, post=twice)
    pair.decode.sink.busy = 1
    prompt = prompt_of(40)
    key = pair.run("r1", prompt)
    # The doubled receipt finds the handoff closed.
    pair.until(lambda: pair.prefill.driver.counters["late_messages"] == 1)
    assert_bytes(pair.decode, pair.decode.sink.kvs[key], prompt)
    counted = pair.decode.driver.counters
    # A double that comes when its handoff is over is a late one.
    assert counted["duplicate_messages"] + counted["late_messages"] >= 2
    assert pair.prefill.driver.counters["duplicate_messages"] >= 1
    assert pair.decode.driver.counters["illegal_messages"] == 0
    pair.decode.sink.release(key)
    pair.assert_idle()


class HeldDesk:
    """Keeps payloads waiting in their staging buffers until it is let go."""

    def __init__(self, desk) -> None:
        self._take = desk.take
        self.came = threading.Event()
        self.go = threading.Event()
        desk.take = self.take

    def take(self, lane, header, payload):
        self.came.set()
        assert self.go.wait(60)
        return self._take(lane, header, payload)


def test_payloads_of_an_aborted_handoff_never_reach_reused_slots(pair):
    source, sink = pair.prefill.source, pair.decode.sink
    first = pair.fetch("first", prompt_of(24, seed=1))
    pair.until(lambda: first in source.queue)
    (peer,) = pair.decode.driver._sink._peers.values()
    desk = HeldDesk(peer.session.desk)
    source.schedule(first)
    pair.until(lambda: state_count(pair.prefill, "source_streaming") == 1)
    source.compute(first, 24)
    pair.until(desk.came.is_set)
    sink.abort(first, "cancelled by the client")
    kv = pair.decode.kv_cache.open("reuser", prompt_of(240, seed=2), "")
    pair.decode.kv_cache.extend(kv, 240)
    fill_kv(pair.decode.kv_cache, kv, prompt_of(240, seed=2), 0, 240)
    desk.go.set()
    pair.until(lambda: first in source.ends)
    # What its source has not gathered by then never leaves.
    pair.until(lambda: pair.decode.driver.counters["chunks_dropped"] >= 1)
    assert_bytes(pair.decode, kv, prompt_of(240, seed=2))
    pair.decode.kv_cache.release(kv, None)
    pair.assert_idle()

    # The ring is whole again.
    prompt = prompt_of(50, seed=3)
    second = pair.run("second", prompt)
    assert_bytes(pair.decode, sink.kvs[second], prompt)
    sink.release(second)
    pair.assert_idle()


def test_an_abort_waits_for_a_scatter_that_runs(pair, monkeypatch):
    """It may be in the middle of a copy, which must not go on in slots of another owner."""
    pool = pair.decode.kv_cache.pool
    inside, go, scatter = threading.Event(), threading.Event(), pool.scatter

    def slow(slots, part, payload):
        inside.set()
        assert go.wait(60)
        scatter(slots, part, payload)

    monkeypatch.setattr(pool, "scatter", slow)
    key = pair.fetch("r1", prompt_of(24))
    pair.until(lambda: key in pair.prefill.source.queue)
    pair.prefill.source.schedule(key)
    pair.prefill.source.compute(key, 24)
    pair.until(inside.is_set)
    aborting = threading.Thread(target=pair.decode.sink.abort, args=(key, "now"))
    aborting.start()
    aborting.join(0.05)
    assert aborting.is_alive(), "the abort has released slots that are being written to"
    go.set()
    aborting.join(60)
    assert not aborting.is_alive()
    pair.until(lambda: key in pair.prefill.source.ends)
    pair.assert_idle()


def test_an_abort_of_the_source_waits_for_a_gather_that_runs(pair, monkeypatch):
    pool = pair.prefill.kv_cache.pool
    inside, go, gather = threading.Event(), threading.Event(), pool.gather

    def slow(slots, part, out):
        inside.set()
        assert go.wait(60)
        return gather(slots, part, out)

    monkeypatch.setattr(pool, "gather", slow)
    key = pair.fetch("r1", prompt_of(24))
    pair.until(lambda: key in pair.prefill.source.queue)
    pair.prefill.source.schedule(key)
    pair.prefill.source.compute(key, 24)
    pair.until(inside.is_set)
    aborting = threading.Thread(target=pair.prefill.source.abort, args=(key, "now"))
    aborting.start()
    aborting.join(0.05)
    assert aborting.is_alive(), "the abort has released slots that are being read"
    go.set()
    aborting.join(60)
    assert not aborting.is_alive()
    pair.until(lambda: key in pair.decode.sink.errors)
    pair.assert_idle()


def test_layers_leave_while_the_step_still_computes(pair):
    """Groups of layers that fill a staging buffer do not wait for the rest of the step."""
    prompt = prompt_of(32)
    key = pair.fetch("r1", prompt)
    source = pair.prefill.source
    pair.until(lambda: key in source.queue)
    source.schedule(key)
    pair.until(lambda: state_count(pair.prefill, "source_streaming") == 1)
    cache, kv = pair.prefill.kv_cache, source.kvs[key]
    fill_kv(cache, kv, prompt, 0, 32)
    for layers in range(1, cache.layout.num_layers):
        pair.prefill.driver.computing(key, 32, layers)
    pair.until(lambda: pair.decode.driver.counters["chunks_received"] >= 2)
    assert kv.committed_len == 0
    cache.commit(kv, 32)
    pair.prefill.driver.computed(key, 32)
    source.finish(key)
    pair.until(lambda: key in source.ends)
    assert_bytes(pair.decode, pair.decode.sink.kvs[key], prompt)
    pair.decode.sink.release(key)
    pair.assert_idle()


class Corrupting:
    """A link factory whose receivers flip one bit of each payload."""

    def __init__(self, factory) -> None:
        self._factory = factory

    def open_sender(self, *arguments):
        return self._factory.open_sender(*arguments)

    def open_receiver(self, name, channel, lane, desk, listener):
        take = desk.take

        def corrupt(lane, header, payload):
            payload[3] ^= 1
            return take(lane, header, payload)

        desk.take = corrupt
        return self._factory.open_receiver(name, channel, lane, desk, listener)


def test_a_flipped_bit_is_never_success():
    layout = small_layout()
    factory = Corrupting(MemoryLinkFactory(5.0, 3, 8 * layout.bytes_per_token))
    pair = HandoffPair(layout=layout, factories={"shared_memory": factory})
    key = pair.fetch("r1", prompt_of(20))
    pair.until(lambda: key in pair.prefill.source.queue)
    pair.prefill.source.serve(key)
    pair.until(lambda: key in pair.decode.sink.errors and key in pair.prefill.source.ends)
    assert "checksum" in str(pair.decode.sink.errors[key])
    assert pair.decode.driver.counters["chunks_rejected"] == 1
    pair.assert_idle()
    pair.close()


def test_a_staging_buffer_must_hold_one_token():
    with pytest.raises(ConfigError, match=r"handoff\.staging_buffer_bytes"):
        HandoffPair(config=HandoffConfig(staging_buffer_bytes=16))


def test_a_prompt_that_can_never_fit_the_sink_ends_both_sides(pair, monkeypatch):
    def refuse(key, prompt_tokens):
        raise InvalidInput("prompt", "longer than the context")

    monkeypatch.setattr(pair.decode.sink, "reserve", refuse)
    key = pair.fetch("r1", prompt_of(20))
    source = pair.prefill.source
    pair.until(lambda: key in source.queue)
    source.schedule(key)
    pair.until(lambda: key in source.ends and key in pair.decode.sink.errors)
    assert "longer than the context" in source.ends[key]
    assert not pair.decode.sink.errors[key].status.retryable
    pair.assert_idle()


def test_calls_of_a_host_after_the_end_are_counted_and_change_nothing(pair):
    key = pair.fetch("r1", prompt_of(20))
    source = pair.prefill.source
    pair.until(lambda: key in source.queue)
    pair.decode.sink.abort(key, "gone")
    pair.until(lambda: key in source.ends)
    kv = pair.prefill.kv_cache.open("late", prompt_of(20), NO_KEY)
    pair.prefill.driver.scheduled(key, kv, 0)
    pair.prefill.driver.computed(key, 20)
    pair.decode.driver.abort_fetch(key, "again")
    assert kv.pins == 0
    assert pair.prefill.driver.counters["late_calls"] == 2
    pair.prefill.kv_cache.release(kv, None)
    pair.assert_idle()
