"""Ranks that fail, hang or are told to end, with models that only add."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from engine import tensor_parallel_group
from engine.attention.metadata import build_attention_metadata
from engine.forward_batch import ForwardBatch
from engine.tensor_parallel_group import RankGroup
from kvferry.clock import MonotonicClock
from kvferry.errors import ConfigError, InternalError
from tests.support.waiting import wait_until


def batch_of(*tokens):
    rows = np.zeros((1, len(tokens)), dtype=np.int32)
    count = [len(tokens)]
    return ForwardBatch(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(len(tokens)),
        out_slots=torch.zeros(len(tokens), dtype=torch.int64),
        attention=build_attention_metadata(rows, [0], count, count, page_size=1),
        logits_at=torch.tensor([0]),
    )


class Adder:
    """The sum over ranks of (rank + 1) * tokens, in `rounds` all-reduces."""

    def __init__(self, collective, rounds=2):
        self.collective = collective
        self.rounds = rounds
        self.thread = threading.current_thread()
        self.trouble = None
        self.followed = 0

    def forward(self, batch, on_layers):
        if self.trouble is not None:
            self.trouble()
        total = torch.zeros(len(batch.token_ids))
        for _ in range(self.rounds):
            summand = (self.collective.shard.rank + 1.0) * batch.token_ids
            self.collective.all_reduce(summand)
            total += summand
        return total

    def follow(self, batch):
        self.forward(batch, None)
        self.followed += 1


class Group:
    """A `RankGroup` of adders, by rank."""

    def __init__(self, ranks):
        self.models = {}
        self.ranks = RankGroup(ranks, self.build)

    def build(self, collective):
        model = self.models[collective.shard.rank] = Adder(collective)
        return model


def rank_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank-")]


@pytest.fixture
def make_group():
    groups = []

    def make(ranks):
        groups.append(Group(ranks))
        return groups[-1]

    yield make
    for group in groups:
        group.ranks.close()
    assert not rank_threads()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sums_over_all_ranks(make_group, ranks):
    group = make_group(ranks)
    factor = 2 * sum(range(1, ranks + 1))
    for tokens in ([5], [1, 2, 3], [7, 0]):
        expected = [float(factor * token) for token in tokens]
        assert group.ranks.forward(batch_of(*tokens), None).tolist() == expected
    threads = [group.models[rank].thread.name for rank in range(1, ranks)]
    assert threads == [f"rank-{rank}" for rank in range(1, ranks)]
    assert group.models[0].thread is threading.current_thread()


def test_a_rank_that_raises_ends_the_step_of_all_with_its_reason(make_group):
    group = make_group(3)
    group.ranks.forward(batch_of(1), None)

    def fail():
        raise ValueError("out of luck")

    group.models[2].trouble = fail
    begun = MonotonicClock().now()
    with pytest.raises(InternalError, match=r"rank 2 failed: ValueError.*out of luck"):
        group.ranks.forward(batch_of(1), None)
    # Nobody has waited for a timeout.
    assert MonotonicClock().now() - begun < 30.0
    with pytest.raises(InternalError, match="rank 2 failed"):
        group.ranks.forward(batch_of(1), None)
    wait_until("the ranks have ended", lambda: not rank_threads(), state=rank_threads)


def test_rank_0_that_raises_leaves_ranks_that_can_be_ended(make_group):
    group = make_group(3)

    def fail():
        raise ValueError("out of luck")

    group.models[0].trouble = fail
    with pytest.raises(ValueError, match="out of luck"):
        group.ranks.forward(batch_of(1), None)
    begun = MonotonicClock().now()
    group.ranks.close()
    assert MonotonicClock().now() - begun < 30.0
    assert not rank_threads()


def test_a_rank_that_hangs_ends_the_step_at_the_deadline(make_group, monkeypatch):
    monkeypatch.setattr(tensor_parallel_group, "RANK_TIMEOUT_S", 0.5)
    group, go = make_group(2), threading.Event()
    group.models[1].trouble = lambda: go.wait(60)
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
        group.ranks.forward(batch_of(1), None)
    go.set()


def test_a_rank_that_cannot_load_ends_the_start_with_its_reason():
    def build(collective):
        if collective.shard.rank == 1:
            raise ConfigError("model.path", "the weights are gone")
        return Adder(collective)

    with pytest.raises(InternalError, match=r"rank 1 failed.*the weights are gone"):
        RankGroup(3, build)
    assert not rank_threads()


def test_rank_0_that_cannot_load_ends_the_others():
    def build(collective):
        if collective.shard.rank == 0:
            raise ConfigError("model.path", "the weights are gone")
        return Adder(collective)

    with pytest.raises(ConfigError, match="the weights are gone"):
        RankGroup(3, build)
    assert not rank_threads()


def test_ranks_without_work_sleep(make_group):
    """They wait in a queue: no processor time passes."""
    group = make_group(3)
    group.ranks.forward(batch_of(1), None)
    wait_until("all have followed", lambda: all(group.models[r].followed for r in (1, 2)))
    clock = MonotonicClock()
    begun, spent = clock.now(), threading.Event()
    used = _cpu_seconds()
    spent.wait(0.1)
    assert _cpu_seconds() - used < 0.5 * (clock.now() - begun)


def _cpu_seconds():
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def test_closing_twice_is_closing(make_group):
    group = make_group(2)
    group.ranks.close()
    group.ranks.close()
    with pytest.raises(RuntimeError, match="rank 0 has left"):
        group.ranks.forward(batch_of(1), None)
