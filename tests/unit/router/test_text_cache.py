from __future__ import annotations

import numpy as np

from router.text_cache import TextCache


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_what_was_put_is_found() -> None:
    cache = TextCache()
    assert cache.get("a") is None
    cache.put("a", ids(1, 2))
    found = cache.get("a")
    assert found is not None
    assert found.tolist() == [1, 2]
    assert not found.flags.writeable, "others read it too"


def test_bytes_are_bounded_and_the_least_recently_used_goes_first() -> None:
    cache = TextCache(bytes_max=20_000)
    for number in range(200):
        cache.put(f"text {number}", ids(number))
        cache.get("text 0")
        cache.check_invariants()
    assert cache.get("text 0") is not None
    assert cache.get("text 1") is None
    assert cache.get("text 199") is not None


def test_a_text_put_twice_is_counted_once() -> None:
    cache = TextCache()
    cache.put("a", ids(1))
    held = cache.bytes_held
    cache.put("a", ids(1))
    assert cache.bytes_held == held
    cache.check_invariants()


def test_a_huge_text_does_not_drive_the_others_out() -> None:
    cache = TextCache(bytes_max=20_000)
    cache.put("a", ids(1))
    cache.put("b" * 2_000, ids(2))
    assert cache.get("a") is not None
    assert cache.get("b" * 2_000) is None
