"""Handoffs between pools of every element type and arrangement: the stored bytes arrive."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvferry.config import KvArrangement, KvDType
from tests.support.handoff_pair import (
    HandoffPair,
    expected_kv,
    fill_kv,
    prompt_of,
    small_cache,
    small_layout,
)
from tests.support.kv_pools import ELEMENT_TYPES, rounding_bound

HND = KvArrangement.HND


def _stored(cache, kv, length) -> torch.Tensor:
    """uint8: the payload of a request's tokens, as its pool stores them."""
    out = torch.empty(length * cache.layout.bytes_per_token, dtype=torch.uint8)
    slots = cache.slots(kv, 0, length)
    assert cache.pool.gather(slots, cache.layout.whole, out) == len(out)
    return out


def _stored_locally(layout, prompt) -> torch.Tensor:
    """As `_stored`, of a cache that computed the prompt by itself."""
    cache = small_cache(layout)
    kv = cache.open("local", prompt, "")
    cache.extend(kv, len(prompt))
    fill_kv(cache, kv, prompt, 0, len(prompt))
    return _stored(cache, kv, len(prompt))


def _check_handoff(source_layout, sink_layout) -> None:
    pair = HandoffPair(layout=source_layout, sink_layout=sink_layout)
    prompt = prompt_of(45)
    pair.decode.sink.release(pair.run("first", prompt[:21]))
    key = pair.run("second", prompt)

    cache, kv = pair.decode.kv_cache, pair.decode.sink.kvs[key]
    usage = pair.decode.sink.adopted_usage[key]
    assert usage.decode_hit_tokens == 20
    assert usage.moved_bytes == 25 * source_layout.bytes_per_token
    assert torch.equal(_stored(cache, kv, 45), _stored_locally(sink_layout, prompt))
    expected = expected_kv(cache, prompt, 0, 45)
    slots = torch.from_numpy(cache.slots(kv, 0, 45))
    for layer in range(cache.layout.num_layers):
        for exact, read in zip(expected[layer], cache.pool.read(layer, slots), strict=True):
            bound = rounding_bound(cache.layout.dtype, exact)
            largest = _largest(cache.layout.dtype)
            assert ((read - exact.clamp(-largest, largest)).abs() <= bound).all()
    pair.decode.sink.release(key)
    pair.assert_idle()
    pair.close()


def _largest(dtype: KvDType) -> float:
    """Beyond it a number is stored as the largest one."""
    return {
        KvDType.FLOAT16: 65504.0,
        KvDType.FLOAT8_E4M3: 448.0,
        KvDType.FLOAT8_E5M2: 57344.0,
    }.get(dtype, float("inf"))


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
def test_stored_bytes_arrive(dtype):
    layout = dataclasses.replace(small_layout(), dtype=dtype)
    _check_handoff(layout, layout)


@pytest.mark.parametrize("dtype", [KvDType.FLOAT32, KvDType.INT8])
def test_workers_may_differ_in_arrangement(dtype):
    nhd = dataclasses.replace(small_layout(), dtype=dtype)
    hnd = dataclasses.replace(nhd, arrangement=HND)
    _check_handoff(nhd, hnd)
    _check_handoff(hnd, nhd)


def test_workers_may_not_differ_in_element_type():
    layout = small_layout()
    pair = HandoffPair(layout=layout, sink_layout=dataclasses.replace(layout, dtype=KvDType.INT8))
    key = pair.fetch("r1", prompt_of(10))
    pair.until(lambda: key in pair.decode.sink.errors)
    assert "KV layout" in str(pair.decode.sink.errors[key])
    pair.assert_idle()
    pair.close()
