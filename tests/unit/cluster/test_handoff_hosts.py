"""Each call of the handoff driver reaches the part of the worker whose handoff it is."""

from __future__ import annotations

import pytest

from cluster.handoff_hosts import WorkerSink, WorkerSource
from kv_transfer.protocol.key import HandoffKey
from kvferry.cache_key import CacheUse
from kvferry.errors import HandoffFailed
from kvferry.generation import AttemptUsage
from kvferry.ids import Attempt, ExtraKey, Incarnation, RequestId
from kvferry.sampling import SamplingParams

OURS, BACK = (
    HandoffKey(RequestId(name), Attempt(1), Incarnation(1), Incarnation(2))
    for name in ("ours", "back")
)
USE = CacheUse(ExtraKey(""))


class Recorder:
    """Stands in for either part."""

    def __init__(self, keys=()):
        self.keys = set(keys)
        self.calls = []

    def __contains__(self, key):
        return key in self.keys

    def __getattr__(self, name):
        return lambda key, *rest: self.calls.append((name, key))


@pytest.fixture
def parts():
    return Recorder(), Recorder([BACK])


def test_prompts_are_computed_and_what_is_held_is_given_back(parts):
    prompts, returns = parts
    source = WorkerSource(prompts, returns)
    source.start(OURS, [1], SamplingParams(), USE, False)
    source.start_held(BACK, [1], USE)
    for key in (OURS, BACK):
        source.closed(key)
        source.cancel(key, "gone")
    assert prompts.calls == [("start", OURS), ("closed", OURS), ("cancel", OURS)]
    assert returns.calls == [("start_held", BACK), ("closed", BACK), ("cancel", BACK)]


def test_what_comes_back_is_no_attempt(parts):
    intake, returns = parts
    sink = WorkerSink(intake, returns)
    for key in (OURS, BACK):
        sink.reserve(key, 1)
        sink.first_tokens(key, ())
        sink.adopted(key, AttemptUsage())
        sink.failed(key, HandoffFailed("gone"))
    methods = ("reserve", "first_tokens", "adopted", "failed")
    assert intake.calls == [(name, OURS) for name in methods]
    assert returns.calls == [(name, BACK) for name in methods]
