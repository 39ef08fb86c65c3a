"""What a peer says or asks wrongly ends that handoff and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kv_transfer.outgoing import SendQueue
from kv_transfer.protocol.region import Region
from kv_transfer.protocol.tombstones import Tombstones
from kvferry.errors import DuplicateRequest, ErrorKind, InvalidInput
from tests.support.handoff_pair import (
    HandoffPair,
    expected_kv,
    prompt_of,
    read_kv,
    small_layout,
    state_count,
)


@pytest.fixture
def pair():
    handoffs = HandoffPair()
    yield handoffs
    handoffs.close()


def test_another_layout_is_refused_before_anything_moves():
    other = dataclasses.replace(small_layout(), num_layers=2)
    pair = HandoffPair(layout=small_layout(), sink_layout=other)
    key = pair.fetch("r1", prompt_of(20))
    pair.until(lambda: key in pair.decode.sink.errors)
    assert "KV layout" in str(pair.decode.sink.errors[key])
    assert not pair.prefill.source.prompts
    pair.assert_idle()
    pair.close()


def test_kv_of_another_model_is_refused_before_anything_moves():
    """Its form is the same: only what the workers say of their models tells."""
    pair = HandoffPair(models=("weights-float32", "weights-float32-int8"))
    key = pair.fetch("r1", prompt_of(20))
    pair.until(lambda: key in pair.decode.sink.errors)
    assert "KV layout" in str(pair.decode.sink.errors[key])
    assert not pair.prefill.source.prompts
    pair.assert_idle()
    pair.close()


def test_a_key_is_fetched_once(pair):
    key = pair.fetch("r1", prompt_of(20))
    with pytest.raises(DuplicateRequest, match="r1"):
        pair.fetch("r1", prompt_of(20))
    assert pair.decode.driver.handoffs_open() == 1
    pair.until(lambda: key in pair.prefill.source.queue)
    pair.decode.sink.abort(key, "enough")
    with pytest.raises(DuplicateRequest, match="r1"):
        pair.fetch("r1", prompt_of(20))
    pair.until(lambda: key in pair.prefill.source.ends)
    pair.assert_idle()


def test_a_prompt_asked_for_again_under_an_ended_key_is_answered(pair):
    key = pair.run("r1", prompt_of(9))
    pair.decode.sink.release(key)
    # A sink that has forgotten it, as after very many handoffs.
    pair.decode.driver._sink._tombstones = Tombstones()
    del pair.decode.sink.adopted_usage[key]
    pair.fetch("r1", prompt_of(9))
    pair.until(lambda: key in pair.decode.sink.errors)
    assert "begun before" in str(pair.decode.sink.errors[key])
    pair.assert_idle()


def test_a_first_token_that_the_host_refuses_fails_that_handoff(pair, monkeypatch):
    def refuse(key, tokens):
        raise InvalidInput("token", "is not one of the model's")

    monkeypatch.setattr(pair.decode.sink, "first_tokens", refuse)
    key = pair.fetch("r1", prompt_of(20))
    pair.until(lambda: key in pair.prefill.source.queue)
    pair.prefill.source.serve(key)
    pair.until(lambda: key in pair.decode.sink.errors and key in pair.prefill.source.ends)
    error = pair.decode.sink.errors[key]
    # The source is at fault, not the client: another worker may do better.
    assert error.kind is ErrorKind.UNAVAILABLE
    assert "not one of the model's" in str(error)
    assert pair.decode.driver.counters["illegal_messages"] == 1
    pair.assert_idle()


@pytest.mark.parametrize(
    ("source_tokens", "sink_tokens", "chunks"), [(8, 3, 7), (3, 8, 7), (8, 8, 3)]
)
def test_a_payload_fits_the_buffers_of_both_sides(source_tokens, sink_tokens, chunks):
    layout = small_layout()
    pair = HandoffPair(layout=layout)
    pair.close()

    def config(tokens):
        return dataclasses.replace(
            pair.config, staging_buffer_bytes=tokens * layout.bytes_per_token
        )

    pair = HandoffPair(config=config(source_tokens), sink_config=config(sink_tokens))
    prompt = prompt_of(20)
    key = pair.fetch("r1", prompt)
    pair.until(lambda: key in pair.prefill.source.queue)
    pair.prefill.source.serve(key, chunk=20)
    pair.until(lambda: key in pair.prefill.source.ends)
    kv = pair.decode.sink.kvs[key]
    expected = expected_kv(pair.decode.kv_cache, prompt, 0, 20)
    assert torch.equal(read_kv(pair.decode.kv_cache, kv, 0, 20), expected)
    assert pair.prefill.driver.counters["chunks_sent"] == chunks
    pair.decode.sink.release(key)
    pair.assert_idle()
    pair.close()


def test_a_sink_whose_buffers_hold_no_token_is_told(pair):
    key = pair.fetch("warm", prompt_of(9))
    pair.until(lambda: key in pair.prefill.source.queue)
    (peer,) = pair.prefill.driver._source._peers.values()
    peer.payload_bytes_max = 8
    other = pair.fetch("r1", prompt_of(9))
    pair.until(lambda: other in pair.decode.sink.errors)
    assert "do not hold one token" in str(pair.decode.sink.errors[other])
    pair.decode.sink.abort(key, "test ends")
    pair.until(lambda: key in pair.prefill.source.ends)
    pair.assert_idle()


@pytest.mark.parametrize(
    "wrong",
    [
        Region(0, 2**32 - 1, 0, 3),
        Region(8, 9, 0, 3),
        Region(0, 8, 0, 2),
        Region(0, 8, 1, 3),
        Region(0, 8, 0, 2**32 - 1),
    ],
)
def test_a_payload_of_another_region_fails_that_handoff(pair, monkeypatch, wrong):
    next_chunk = SendQueue.next_chunk

    def say_wrongly(queue, seq, out):
        header = next_chunk(queue, seq, out)
        return header and dataclasses.replace(header, region=wrong)

    monkeypatch.setattr(SendQueue, "next_chunk", say_wrongly)
    key = pair.fetch("r1", prompt_of(20))
    pair.until(lambda: key in pair.prefill.source.queue)
    pair.prefill.source.schedule(key)
    pair.prefill.source.compute(key, 20)
    pair.until(lambda: key in pair.decode.sink.errors and key in pair.prefill.source.ends)
    assert pair.decode.driver.counters["chunks_rejected"] == 1
    assert str(wrong) in str(pair.decode.sink.errors[key]) or "bytes" in str(
        pair.decode.sink.errors[key]
    )
    pair.assert_idle()


def test_a_payload_of_an_unknown_stream_reaches_no_slots(pair, monkeypatch):
    next_chunk = SendQueue.next_chunk

    def say_wrongly(queue, seq, out):
        header = next_chunk(queue, seq, out)
        return header and dataclasses.replace(header, stream=header.stream + 1000)

    monkeypatch.setattr(SendQueue, "next_chunk", say_wrongly)
    key = pair.fetch("r1", prompt_of(20))
    pair.until(lambda: key in pair.prefill.source.queue)
    pair.prefill.source.serve(key)
    pair.until(lambda: pair.decode.driver.counters["chunks_dropped"] == 3)
    # The session's messages may come later than the link's.
    pair.until(lambda: state_count(pair.decode, "sink_settling") == 1)
    pair.decode.sink.abort(key, "test ends")
    pair.until(lambda: key in pair.prefill.source.ends)
    pair.assert_idle()
