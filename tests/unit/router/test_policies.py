"""The policies on small snapshots: what each prefers, and what the default pays for."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.clock import ManualClock
from kvferry.ids import Incarnation, WorkerId
from kvferry.kv_events import BlockHash
from kvferry.membership import Role, WorkerInfo
from kvferry.router_config import PolicyName
from router.load import LoadBook
from router.policies.approximate_tree import approximate_tree
from router.policies.consistent_hashing import consistent_hashing, consistent_hashing_bounded
from router.policies.least_loaded import least_loaded
from router.policies.pending_prompts import PendingPrompts
from router.policies.pool import NO_HEAT, Heat, PoolView, Prompt
from router.policies.prefix_heat import PrefixHeat
from router.policies.priced_time import copies_price_ms, priced_time
from router.policies.round_robin import round_robin
from router.policies.sent_prefixes import SentPrefixes
from router.policy import NO_WORKERS, ClusterView, CostModel, Demand, Roster, WorkersView
from router.route_chooser import RouteChooser

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 16
NEVER = float("-inf")
HASHES = tuple(BlockHash(1000 + number) for number in range(64))


def prompt(first: int = 1, blocks: int = 64) -> Prompt:
    keys = np.arange(first, first + blocks, dtype=np.uint64)
    return Prompt(blocks * BLOCK, keys, np.arange(1, blocks + 1, dtype=np.int64) * BLOCK)


def pool(hits: list[int], **columns: object) -> PoolView:
    count = len(hits)
    zeros = np.zeros(count, dtype=np.int64)
    view = PoolView(
        names=np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x1234567),
        hit_tokens=np.array(hits, dtype=np.int64),
        queue_ms=np.zeros(count),
        tokens_per_ms=np.ones(count),
        requests=zeros,
        active_tokens=zeros,
        slots=zeros,
        sent_tokens=zeros,
        turn=0,
        typical_tokens=100.0,
        heat=NO_HEAT,
    )
    return dataclasses.replace(view, **columns)


def heat(tokens: int, requests: float, total: float) -> Heat:
    return Heat(np.array([tokens]), np.array([requests], dtype=np.float64), total)


def best(costs: NDArray[np.float64]) -> int:
    return int(costs.argmin())


# --- the default ----------------------------------------------------------------------------------


def test_a_rare_prefix_is_waited_for_longer_than_its_copy_takes() -> None:
    """16 workers, one holds 800 tokens of a prompt that one request in a hundred has."""
    queue = np.zeros(16)
    queue[0] = 1500.0
    rare = pool([800] + [0] * 15, queue_ms=queue, heat=heat(800, 5.0, 500.0))
    assert best(priced_time(rare, prompt())) == 0
    assert (copies_price_ms(rare)[1:] > 800).all()


def test_a_prefix_that_all_share_does_not_pile_up() -> None:
    """One holder for everybody: a copy that is missing is computed sooner than it pays."""
    queue = np.zeros(16)
    queue[0] = 600.0
    shared = pool([800] + [0] * 15, queue_ms=queue, heat=heat(800, 500.0, 500.0))
    assert best(priced_time(shared, prompt())) != 0
    assert (copies_price_ms(shared)[1:] < 0).all()


def test_the_price_rises_with_the_copies_there_are() -> None:
    """A prefix that a quarter of the requests have deserves four copies among 16 workers."""
    prices = [
        copies_price_ms(pool([800] * copies + [0] * (16 - copies), heat=heat(800, 125, 500)))[-1]
        for copies in (1, 2, 6, 12)
    ]
    assert prices == sorted(prices)
    assert prices[0] < 0 < prices[-1]


def test_only_what_a_worker_lacks_is_priced() -> None:
    view = pool([800, 400, 0], heat=Heat(np.array([400, 800]), np.array([9.0, 3.0]), 500.0))
    held, half, none = copies_price_ms(view)
    assert held == 0 < half < none


def test_without_a_past_nothing_is_priced() -> None:
    assert copies_price_ms(pool([0, 0])).tolist() == [0, 0]


# --- the others -----------------------------------------------------------------------------------


def test_round_robin_takes_turns() -> None:
    turns = [best(round_robin(pool([0] * 3, turn=turn), prompt())) for turn in range(6)]
    assert turns == [0, 1, 2, 0, 1, 2]


def test_consistent_hashing_moves_only_the_keys_of_a_worker_that_left() -> None:
    whole = pool([0] * 8)
    rest = dataclasses.replace(pool([0] * 7), names=whole.names[:7])
    before = [best(consistent_hashing(whole, prompt(first))) for first in range(1, 9000, 64)]
    after = [best(consistent_hashing(rest, prompt(first))) for first in range(1, 9000, 64)]
    assert len(set(before)) == 8
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 7)


def test_bounded_loads_pass_a_full_worker_over() -> None:
    home = best(consistent_hashing(pool([0] * 4), prompt()))
    loads = np.ones(4, dtype=np.int64)
    loads[home] = 4
    assert best(consistent_hashing_bounded(pool([0] * 4, requests=loads), prompt())) != home


def test_the_approximate_tree_balances_only_beyond_its_bounds() -> None:
    sent = np.array([800, 0])
    near = pool([0, 0], sent_tokens=sent, requests=np.array([60, 0]))
    far = pool([0, 0], sent_tokens=sent, requests=np.array([70, 0]))
    assert best(approximate_tree(near, prompt())) == 0
    assert best(approximate_tree(far, prompt())) == 1


def test_least_loaded_counts_requests() -> None:
    assert best(least_loaded(pool([900, 0], requests=np.array([3, 2])), prompt())) == 1


# --- what a router remembers ----------------------------------------------------------------------


def test_heat_counts_what_was_asked_for_and_forgets_it() -> None:
    counts = PrefixHeat(memory_requests=50, counters=1 << 12)
    for _ in range(20):
        counts.add(prompt(1, 4).keys)
    hot = counts.counts(prompt(1, 4).keys)
    assert hot == pytest.approx(np.full(4, counts.requests))
    for first in range(100, 100 + 8 * 200, 8):
        counts.add(prompt(first, 4).keys)
    assert (counts.counts(prompt(1, 4).keys) < 0.05 * hot).all()
    assert counts.requests == pytest.approx(50, rel=0.05)


def test_heat_outlives_the_rescaling_of_its_counts() -> None:
    counts = PrefixHeat(memory_requests=10, counters=1 << 10)
    for _ in range(1000):
        counts.add(prompt(1, 2).keys)
    assert counts.counts(prompt(1, 2).keys) == pytest.approx(np.full(2, 11.0), rel=0.01)


def branching(branch: int, blocks: int) -> Prompt:
    """Branches 0 and 1 share their first four blocks, 2 has no block in common with them."""
    keys = np.arange(1 + 1000 * branch, 1 + 1000 * branch + blocks, dtype=np.uint64)
    if branch == 1:
        keys[:4] = np.arange(1, 5)[: keys[:4].size]
    return Prompt(blocks * BLOCK, keys, np.arange(1, blocks + 1, dtype=np.int64) * BLOCK)


@pytest.mark.parametrize("seed", range(4))
def test_pending_prompts_agree_with_a_plain_record(seed: int) -> None:
    """Whatever is asked for lies within the memory; what is older is forgotten."""
    rng = random.Random(seed)
    pending, plain = PendingPrompts(10.0, 2**30), {}
    workers = np.array([rng.getrandbits(64) for _ in range(20)], dtype=np.uint64)
    for step in range(300):
        now = 0.25 * step
        sent = branching(rng.randrange(3), rng.randrange(13))
        worker = int(workers[rng.randrange(1 + step // 20)])
        pending.add(worker, sent, now)
        plain |= {(worker, key): now for key in sent.keys.tolist()}
        asked = branching(rng.randrange(3), rng.randrange(13))
        some = workers[[rng.randrange(20) for _ in range(rng.randrange(20))]]
        since = np.array([now - rng.choice([0.0, 1.0, 4.1, 10.0]) for _ in range(some.size)])
        told = pending.tokens(some, asked, since).tolist()
        for name, time, tokens in zip(some.tolist(), since.tolist(), told, strict=True):
            was_sent = [plain.get((name, key), NEVER) >= time for key in asked.keys.tolist()]
            assert tokens == BLOCK * [*was_sent, False].index(False)
    pending.add(1, prompt(1, 0), 1000.0)
    assert pending.nbytes == 0


def test_pending_prompts_are_bounded_and_forget_the_oldest() -> None:
    pending, asks = PendingPrompts(1e9, 100_000), [branching(n, 10) for n in range(2, 400)]
    worker = np.array([7], dtype=np.uint64)
    for number, asked in enumerate(asks):
        pending.add(7, asked, float(number))
        assert pending.nbytes <= 100_000
    found = [int(pending.tokens(worker, asked, np.zeros(1))[0]) for asked in asks]
    kept = found.count(10 * BLOCK)
    assert 50 < kept < 200, kept
    assert found == [0] * (len(asks) - kept) + [10 * BLOCK] * kept


def test_sent_prefixes_agree_with_a_plain_record() -> None:
    sent, plain, rng = SentPrefixes(10_000), set(), random.Random(4)
    for _ in range(60):
        worker, asked = rng.randrange(3), branching(rng.randrange(3), rng.randrange(1, 12))
        sent.add(worker, asked)
        plain |= {(worker, key) for key in asked.keys.tolist()}
        for branch in range(3):
            asked = branching(branch, 12)
            for worker, tokens in enumerate(sent.tokens(range(4), asked).tolist()):
                held = [(worker, key) in plain for key in asked.keys.tolist()]
                assert tokens == BLOCK * [*held, False].index(False)


def test_sent_prefixes_are_bounded_and_forget_the_oldest() -> None:
    sent = SentPrefixes(16)
    for number in range(3):
        sent.add(1, prompt(1 + 100 * number, 6))
    kept = [sent.tokens([1], prompt(1 + 100 * n, 6)).tolist() for n in range(3)]
    assert kept == [[0], [6 * BLOCK], [6 * BLOCK]]


# --- the chooser over a fleet ---------------------------------------------------------------------


class Cluster:
    """Workers of one role whose index says nothing yet."""

    def __init__(self, count: int, policy: PolicyName = PolicyName.PRICED_TIME) -> None:
        self.clock = ManualClock()
        self.loads = LoadBook()
        self.names = [WorkerId(f"w{number}") for number in range(count)]
        for name in self.names:
            self.loads.add(name)
        model = CostModel(kv_bytes_per_token=1000, running_max=32)
        self.chooser = RouteChooser(policy, model, BLOCK, self.clock)
        self.rng = random.Random(2)
        infos = [WorkerInfo(name, Role.BOTH, Incarnation(1), f"{name}:1") for name in self.names]
        self.roster, self.rows = Roster.of(infos), self.loads.rows_of(self.names)

    def ask(self, hashes: tuple[BlockHash, ...], avoid: frozenset[WorkerId] = frozenset()) -> str:
        hits = np.zeros(len(self.names), dtype=np.int64)
        workers = WorkersView(self.roster, hits, self.loads.loads(self.rows))
        demand, keys = Demand(len(hashes) * BLOCK, 32), np.array(hashes, dtype=np.uint64)
        route = self.chooser.choose(ClusterView(NO_WORKERS, workers), demand, keys, avoid, self.rng)
        chosen = route.decode.worker_id
        self.loads.dispatch(
            self.clock.now(),
            prefill=chosen,
            decode=chosen,
            prefill_tokens=route.prefill_tokens,
            kv_tokens=demand.prompt_tokens,
        )
        return chosen


def test_what_was_sent_counts_before_any_event_tells_of_it() -> None:
    cluster = Cluster(4)
    first = cluster.ask(HASHES)
    assert cluster.ask(HASHES) == first


def test_dispatched_load_counts_at_once() -> None:
    cluster = Cluster(4)
    asked = [tuple(BlockHash(10_000 * n + block) for block in range(64)) for n in range(1, 9)]
    chosen = [cluster.ask(hashes) for hashes in asked]
    assert sorted(map(chosen.count, cluster.names)) == [2, 2, 2, 2]


def test_a_burst_with_one_prefix_spreads() -> None:
    """All of a hundred prompts share 63 of 64 blocks."""
    cluster = Cluster(4)
    chosen = [cluster.ask((*HASHES[:63], BlockHash(5000 + number))) for number in range(100)]
    assert min(map(chosen.count, cluster.names)) >= 15


@pytest.mark.parametrize("policy", PolicyName)
def test_every_policy_serves_and_avoids(policy: PolicyName) -> None:
    cluster = Cluster(4, policy)
    avoid = frozenset(cluster.names[:2])
    chosen = {cluster.ask(HASHES[: 1 + number % 9], avoid) for number in range(40)}
    assert chosen <= set(cluster.names[2:])


def test_ties_are_drawn_at_random() -> None:
    first = {Cluster(4).names.index(WorkerId(_first_choice(seed))) for seed in range(40)}
    assert first == {0, 1, 2, 3}


def _first_choice(seed: int) -> str:
    cluster = Cluster(4)
    cluster.rng = random.Random(seed)
    return cluster.ask(HASHES)
