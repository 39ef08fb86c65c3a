"""Traces, as often and as fast as asked for."""

from __future__ import annotations

import json

import pytest

from kvferry.errors import InvalidInput
from simulator.workload import generated, read_workload


def row(at_ms: int, length: int, hash_ids: list[int]) -> str:
    row = {"timestamp": at_ms, "input_length": length, "output_length": 7, "hash_ids": hash_ids}
    return json.dumps(row)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "small.jsonl"
    lines = [row(0, 1030, [1, 2, 3]), row(1000, 1024, [1, 2]), row(4000, 600, [4, 5])]
    path.write_text("\n".join(lines), encoding="utf-8")
    return read_workload(path, seed=0)


def test_times_are_scaled_to_the_rate_and_prefixes_shared(trace):
    first, second, third = trace.requests(3, rate=1.5, page_size=256, seed=0)
    assert [first.at_s, second.at_s, third.at_s] == [0.0, 0.5, 2.0]
    assert first.ids[:4].tolist() == second.ids[:4].tolist()
    assert len(set(first.ids[:4].tolist()) | set(third.ids[:2].tolist())) == 6
    assert [asked.ids.size for asked in (first, second, third)] == [5, 5, 3]


def test_copies_share_nothing(trace):
    asked = list(trace.requests(9, rate=10.0, page_size=512, seed=0))
    times = [each.at_s for each in asked]
    assert times == sorted(times)
    firsts = [int(each.ids[0]) for each in asked]
    # In each of three copies two requests begin alike, and one does not.
    assert len(set(firsts)) == 6


def test_equal_seeds_are_equal():
    one, two = (generated(5, 600, 20, seed=4).requests(5, 1.0, 16, 4) for _ in range(2))
    assert [(a.at_s, a.ids.tolist()) for a in one] == [(b.at_s, b.ids.tolist()) for b in two]


def test_what_is_no_trace_is_refused(tmp_path, trace):
    with pytest.raises(InvalidInput, match="page_size"):
        next(trace.requests(1, 1.0, page_size=48, seed=0))
    path = tmp_path / "other.txt"
    path.write_text("nothing of it\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match="trace"):
        read_workload(path, seed=0)
    with pytest.raises(InvalidInput, match="trace"):
        read_workload(tmp_path / "absent", seed=0)
