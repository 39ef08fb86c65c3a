"""Every implementation of `KvPool`: what is written is read, and what is moved is moved exactly."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from kvferry.config import KvArrangement
from mem_cache.layout import KvPart
from mem_cache.pool_choice import build_kv_pool
from tests.support.kv_pools import (
    all_layouts,
    layout_name,
    mha_layouts,
    rounding_bound,
    vectors_of,
)

NUM_SLOTS = 16
HEADS = 8
EVERY_POOL = pytest.mark.parametrize("layout", [*all_layouts(1), *all_layouts(4)], ids=layout_name)
LAYERS = pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 2), (1, 3), (2, 2)])


def _bits(pool):
    """All bytes of it: NaN equals itself."""
    return pool.buffer.view(-1).view(torch.uint8)


def _random_pool(layout, seed, num_slots=NUM_SLOTS):
    """Every byte of it random, the dummy page included."""
    pool = build_kv_pool(layout, num_slots)
    content = _bits(pool)
    generator = torch.Generator().manual_seed(seed)
    content.copy_(torch.randint(0, 256, content.shape, generator=generator, dtype=torch.uint8))
    return pool


def _slots(seed, count, layout):
    first = layout.page_size
    picked = np.random.default_rng(seed).permutation(NUM_SLOTS)[:count] + first
    return picked.astype(np.int64)


def _part(pool, start=0, stop=3):
    """All heads of some layers."""
    return dataclasses.replace(pool.layout.whole, layer_start=start, layer_stop=stop)


def _gathered(pool, slots, part):
    out = torch.empty(pool.payload_bytes(len(slots), part), dtype=torch.uint8)
    assert pool.gather(slots, part, out) == len(out)
    return out


def _payload(pool, slots, start=0, stop=3):
    return _gathered(pool, slots, _part(pool, start, stop))


@EVERY_POOL
def test_memory_is_what_the_budget_counts(layout):
    pool = build_kv_pool(layout, NUM_SLOTS)
    assert pool.layout == layout
    assert pool.num_slots == NUM_SLOTS
    assert pool.buffer.nbytes == (NUM_SLOTS + layout.page_size) * layout.bytes_per_token
    assert pool.payload_bytes(1, layout.whole) == layout.bytes_per_token


@EVERY_POOL
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
def test_read_returns_what_was_written_up_to_rounding(layout, model_dtype):
    pool = _random_pool(layout, 1)
    slots = torch.from_numpy(_slots(2, 7, layout))
    wrote = [part.to(model_dtype) for part in vectors_of(layout, 7, 3)]
    pool.write(1, slots, *wrote)
    order = torch.tensor([6, 0, 0, 3])
    for value, read in zip(wrote, pool.read(1, slots[order]), strict=True):
        expected = value[order].double()
        assert read.dtype == torch.float32
        assert read.shape == expected.shape
        bound = rounding_bound(layout.dtype, expected)
        assert ((read.double() - expected).abs() <= bound).all()


@EVERY_POOL
def test_write_touches_its_slots_of_its_layer_alone(layout):
    pool = _random_pool(layout, 1)
    slots = _slots(2, 5, layout)
    every = np.arange(NUM_SLOTS + layout.page_size, dtype=np.int64)
    others = np.setdiff1d(every, slots)
    before = [_payload(pool, every, 0, 1), _payload(pool, others, 1, 2), _payload(pool, every, 2)]
    inside = _payload(pool, slots, 1, 2)
    pool.write(1, torch.from_numpy(slots), *vectors_of(layout, 5, 3))
    after = [_payload(pool, every, 0, 1), _payload(pool, others, 1, 2), _payload(pool, every, 2)]
    assert all(map(torch.equal, before, after))
    assert not torch.equal(_payload(pool, slots, 1, 2), inside)


@EVERY_POOL
@LAYERS
def test_a_payload_is_layers_planes_tokens(layout, start, stop):
    """Token by token whatever the arrangement: cut from payloads of one token of one layer."""
    pool = _random_pool(layout, 4)
    slots = _slots(5, 6, layout)
    out = torch.full((20_000,), 77, dtype=torch.uint8)
    used = pool.gather(slots, _part(pool, start, stop), out)
    assert used == (stop - start) * layout.planes * 6 * layout.heads * layout.unit_bytes
    assert (out[used:] == 77).all()
    shape = (stop - start, layout.planes, 6, layout.heads, layout.unit_bytes)
    tokens = out[:used].view(shape)
    for layer, token in itertools.product(range(start, stop), range(6)):
        alone = _payload(pool, slots[token : token + 1], layer, layer + 1)
        assert torch.equal(tokens[layer - start, :, token].flatten(), alone)


@EVERY_POOL
def test_a_payload_holds_what_is_read(layout):
    """Bytes of a token, decoded by themselves, are the vectors of that token."""
    pool, other = _random_pool(layout, 4), _random_pool(layout, 5)
    slots, elsewhere = _slots(6, 4, layout), _slots(7, 4, layout)
    for layer in range(3):
        pool.write(layer, torch.from_numpy(slots), *vectors_of(layout, 4, layer))
    other.scatter(elsewhere, layout.whole, _payload(pool, slots))
    for layer in range(3):
        ours = pool.read(layer, torch.from_numpy(slots))
        theirs = other.read(layer, torch.from_numpy(elsewhere))
        assert all(map(torch.equal, ours, theirs))


def _stored(pool, slots, part):
    """uint8 [layers, planes, tokens, heads, unit_bytes]: read from the buffer slot by slot."""
    layers = pool.buffer.view(torch.uint8)[part.layer_start : part.layer_stop]
    size = pool.layout.page_size
    by_head = pool.layout.order is KvArrangement.HND
    tokens = [
        layers[:, :, slot // size, :, slot % size] if by_head else layers[:, :, slot]
        for slot in slots.tolist()
    ]
    return torch.stack(tokens, dim=2)[:, :, :, part.head_start : part.head_stop]


def _chained(*ranges):
    return np.concatenate([np.arange(*some, dtype=np.int64) for some in ranges])


RUNS = {
    "one run": _chained((19, 87)),
    "whole pages": _chained((16, 112)),
    "pages out of order": _chained((64, 96), (32, 64), (96, 112)),
    "runs within pages": _chained((17, 51), (66, 94)),
    "a slot": _chained((21, 22)),
    "an end of a page": _chained((29, 32)),
    "short runs": _chained((18, 24), (90, 99), (40, 41)),
    "scattered": np.random.default_rng(1).permutation(96).astype(np.int64)[:40] + 16,
}
"""Slots of a pool of 96 and a page of up to 16."""


@pytest.mark.parametrize("slots", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("layout", [*all_layouts(4), *all_layouts(16)], ids=layout_name)
def test_neighbouring_slots_are_moved_like_others(layout, slots):
    physical = np.arange(112)
    num_slots = len(physical) - layout.page_size
    for heads in ((0, layout.heads), (layout.heads - 1, layout.heads), (0, 1)):
        part = KvPart(1, 3, *heads)
        pool, other = (_random_pool(layout, seed, num_slots) for seed in (1, 2))
        payload = _gathered(pool, slots, part)
        expected = _stored(pool, slots, part)
        assert torch.equal(payload.view(expected.shape), expected)
        everything = _stored(other, physical, layout.whole)
        other.scatter(slots, part, payload)
        everything[1:3, :, slots, heads[0] : heads[1]] = expected
        assert torch.equal(_stored(other, physical, layout.whole), everything)


@EVERY_POOL
@pytest.mark.parametrize("beyond", [1, 20])
def test_slots_beyond_the_pool_are_refused(layout, beyond):
    pool = build_kv_pool(layout, 32)
    stop = 32 + layout.page_size + beyond
    for slots in (np.arange(stop - 20, stop), np.arange(stop - 1, stop - 41, -2)):
        payload = torch.empty(pool.payload_bytes(len(slots), layout.whole), dtype=torch.uint8)
        with pytest.raises(
            (AssertionError, IndexError), match=r"no such slots|out of (range|bounds)"
        ):
            pool.gather(slots, layout.whole, payload)
        with pytest.raises(
            (AssertionError, IndexError), match=r"no such slots|out of (range|bounds)"
        ):
            pool.scatter(slots, layout.whole, payload)


@EVERY_POOL
def test_slots_are_copied_whole(layout, monkeypatch):
    monkeypatch.setattr("mem_cache.paged_pool.COPY_BYTES", 2 * layout.bytes_per_token)
    pool, before = _random_pool(layout, 1), _random_pool(layout, 1)
    picked = _slots(2, 10, layout)
    source, target = picked[:5], picked[5:]
    pool.copy(source, target)
    assert torch.equal(_payload(pool, target), _payload(before, source))
    every = np.arange(NUM_SLOTS + layout.page_size, dtype=np.int64)
    others = np.setdiff1d(every, target)
    assert torch.equal(_payload(pool, others), _payload(before, others))
    pool.copy(source[:0], target[:0])
    assert torch.equal(_payload(pool, others), _payload(before, others))


@EVERY_POOL
@LAYERS
def test_scatter_undoes_gather_byte_for_byte(layout, start, stop):
    source, sink = _random_pool(layout, 1), _random_pool(layout, 2)
    here, there = _slots(3, 5, layout), _slots(4, 5, layout)
    every = np.arange(NUM_SLOTS + layout.page_size, dtype=np.int64)
    others = np.setdiff1d(every, there)
    before = _payload(sink, others)
    outside = [_payload(sink, there, 0, start), _payload(sink, there, stop)]
    payload = _payload(source, here, start, stop)
    sink.scatter(there, _part(sink, start, stop), payload)
    assert torch.equal(_payload(sink, there, start, stop), payload)
    assert torch.equal(_payload(sink, others), before)
    after = [_payload(sink, there, 0, start), _payload(sink, there, stop)]
    assert all(map(torch.equal, outside, after))


@EVERY_POOL
def test_a_payload_must_fit(layout):
    pool = build_kv_pool(layout, NUM_SLOTS)
    slots = np.asarray([4, 5], dtype=np.int64)
    short = torch.empty(2 * layout.bytes_per_token - 1, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="exceeds"):
        pool.gather(slots, layout.whole, short)
    with pytest.raises(AssertionError, match="lacks"):
        pool.scatter(slots, layout.whole, short)
    nothing = np.empty(0, dtype=np.int64)
    assert pool.gather(nothing, layout.whole, short) == 0
    pool.scatter(nothing, layout.whole, short)


@pytest.mark.parametrize("layout", mha_layouts(4), ids=layout_name)
def test_arrangements_exchange_payloads(layout):
    (turned,) = (order for order in KvArrangement if order is not layout.arrangement)
    other = dataclasses.replace(layout, arrangement=turned)
    assert other.exchange_hash() == layout.exchange_hash()
    source, sink = build_kv_pool(layout, NUM_SLOTS), build_kv_pool(other, NUM_SLOTS)
    here, there = _slots(1, 6, layout), _slots(2, 6, layout)
    for layer in range(3):
        source.write(layer, torch.from_numpy(here), *vectors_of(layout, 6, layer))
    sink.scatter(there, layout.whole, _payload(source, here))
    for layer in range(3):
        ours = source.read(layer, torch.from_numpy(here))
        theirs = sink.read(layer, torch.from_numpy(there))
        assert all(map(torch.equal, ours, theirs))


def test_layouts_of_other_bytes_do_not_exchange():
    layouts = [*all_layouts(1), *all_layouts(4)]
    formats = {(type(layout), layout.dtype): layout.exchange_hash() for layout in layouts}
    assert len(set(formats.values())) == len(formats) == 2 * 6
    pages = {(*key, size) for key in formats for size in (1, 4)}
    assert len({layout.page_hash for layout in layouts}) == len(pages)


def _shards(pool, ranks):
    """Pools that share the heads of `pool`, and hold what it holds."""
    heads = pool.layout.heads // ranks
    shards = []
    for first in range(0, pool.layout.heads, heads):
        layout = dataclasses.replace(pool.layout, num_kv_heads=heads)
        shards.append(build_kv_pool(layout, NUM_SLOTS))
        # Heads are the fourth dimension in either arrangement.
        shards[-1].buffer.copy_(pool.buffer[:, :, :, first : first + heads])
    return shards


def _overlaps(source_ranks, sink_ranks):
    """(source, its part, sink, its part) for each pair of ranks that share heads; 3 layers."""
    per_source, per_sink = HEADS // source_ranks, HEADS // sink_ranks
    for source, sink in itertools.product(range(source_ranks), range(sink_ranks)):
        start = max(source * per_source, sink * per_sink)
        stop = min((source + 1) * per_source, (sink + 1) * per_sink)
        if start < stop:
            ours, theirs = (
                KvPart(0, 3, start - rank * per_rank, stop - rank * per_rank)
                for rank, per_rank in ((source, per_source), (sink, per_sink))
            )
            yield source, ours, sink, theirs


@pytest.mark.parametrize("ranks", [*itertools.product((1, 2, 4), repeat=2)], ids=str)
@pytest.mark.parametrize("sink_order", KvArrangement)
@pytest.mark.parametrize("layout", mha_layouts(4), ids=layout_name)
def test_heads_are_cut_anew_between_shards(layout, sink_order, ranks):
    """As if both sides were unsharded, whatever the arrangements and page sizes."""
    layout = dataclasses.replace(layout, num_kv_heads=HEADS)
    source = _random_pool(layout, 1)
    sink = _random_pool(dataclasses.replace(layout, arrangement=sink_order, page_size=8), 2)
    here, there = _slots(3, 6, source.layout), _slots(4, 6, sink.layout)
    sources, sinks = _shards(source, ranks[0]), _shards(sink, ranks[1])
    assert sources[0].layout.exchange_hash(ranks[0]) == sinks[0].layout.exchange_hash(ranks[1])
    for rank, part, sink_rank, sink_part in _overlaps(*ranks):
        sinks[sink_rank].scatter(there, sink_part, _gathered(sources[rank], here, part))
    sink.scatter(there, layout.whole, _payload(source, here))
    for shard, expected in zip(sinks, _shards(sink, ranks[1]), strict=True):
        assert torch.equal(_bits(shard), _bits(expected))
    assert torch.equal(_payload(sink, there), _payload(source, here))
