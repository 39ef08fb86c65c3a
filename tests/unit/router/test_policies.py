"""The policies on small snapshots: what each prefers, and what the default pays for."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.accounts import KvAccounts, WorkerLoad
from kvferry.clock import ManualClock
from kvferry.ids import Incarnation, WorkerId
from kvferry.kv_events import BlockHash
from kvferry.membership import Role, WorkerInfo
from kvferry.router_config import PolicyName
from router.load import LoadBook
from router.policies.approximate_tree import approximate_tree
from router.policies.consistent_hashing import consistent_hashing, consistent_hashing_bounded
from router.policies.history import PlacementHistory
from router.policies.least_loaded import least_loaded
from router.policies.pending_prompts import PendingPrompts
from router.policies.pool import NO_HEAT, Heat, PoolView, Prompt
from router.policies.prefix_uses import PrefixUses
from router.policies.priced_time import copies_price_ms, priced_time
from router.policies.round_robin import round_robin
from router.policies.sent_prefixes import SentPrefixes
from router.policy import ClusterView, CostModel, Demand, Roster, WorkersView
from router.route_chooser import RouteChooser

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from router.policy import Route

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
        lost_share=0.0,
        heat=NO_HEAT,
    )
    return view._replace(**columns)


def heat(tokens: int, requests: float, seconds: float) -> Heat:
    return Heat(np.array([tokens]), np.array([requests]), np.array([seconds]))


def best(costs: NDArray[np.float64]) -> int:
    return int(costs.argmin())


# --- the default ----------------------------------------------------------------------------------


BUSY = np.ones(16)
"""Milliseconds: all workers have something to compute, none of them much."""


def test_a_rare_prefix_is_waited_for_longer_than_its_copy_takes() -> None:
    """16 workers, one holds 800 tokens of a prompt that is asked for every 200 seconds."""
    queue = BUSY.copy()
    queue[0] = 1500.0
    rare = pool([800] + [0] * 15, queue_ms=queue, heat=heat(800, 5.0, 1000.0))
    assert best(priced_time(rare, prompt())) == 0
    assert (copies_price_ms(rare, prompt())[1:] > 800).all()


def test_a_prefix_that_all_share_does_not_pile_up() -> None:
    """One holder for everybody: a copy that is missing is computed sooner than it pays."""
    queue = BUSY.copy()
    queue[0] = 600.0
    shared = pool([800] + [0] * 15, queue_ms=queue, heat=heat(800, 500.0, 50.0))
    assert best(priced_time(shared, prompt())) != 0
    assert (copies_price_ms(shared, prompt())[1:] < 0).all()


def test_the_price_rises_with_the_copies_there_are() -> None:
    """A prefix whose requests keep four workers busy to the share that is meant to be."""
    prices = []
    for copies in (1, 2, 6, 12):
        hits = [800] * copies + [0] * (16 - copies)
        view = pool(hits, queue_ms=BUSY, heat=heat(800, 125.0, 23.0))
        prices.append(copies_price_ms(view, prompt())[-1])
    assert prices == sorted(prices)
    assert prices[0] < 0 < prices[-1]


def test_a_copy_that_will_be_used_more_costs_less() -> None:
    """Asked for every ten seconds, ten times or a thousand times so far."""
    new, old = (
        copies_price_ms(
            pool([800] + [0] * 15, queue_ms=BUSY, heat=heat(800, count, 10.0 * count)), prompt()
        )[1]
        for count in (10.0, 1000.0)
    )
    assert 0 < 3 * old < new


def test_useless_work_costs_others_nothing_while_workers_idle_and_nothing_is_evicted() -> None:
    costs = [
        copies_price_ms(pool([800] + [0] * 15, heat=heat(800, 2.0, 100.0), **columns), prompt())[1]
        for columns in ({}, {"queue_ms": BUSY}, {"lost_share": 0.1})
    ]
    assert costs[0] <= 0 < 800 < costs[1] < costs[2]


def test_only_what_a_worker_lacks_is_priced() -> None:
    parts = Heat(np.array([400, 800]), np.array([9.0, 3.0]), np.array([100.0, 100.0]))
    view = pool([800, 400, 0], queue_ms=np.ones(3), heat=parts)
    held, half, none = copies_price_ms(view, prompt())
    assert held == 0 < half < none


def test_without_a_past_nothing_is_priced() -> None:
    assert copies_price_ms(pool([0, 0], queue_ms=np.ones(2)), prompt()).tolist() == [0, 0]


# --- the others -----------------------------------------------------------------------------------


def test_round_robin_takes_turns() -> None:
    turns = [best(round_robin(pool([0] * 3, turn=turn), prompt())) for turn in range(6)]
    assert turns == [0, 1, 2, 0, 1, 2]


def test_consistent_hashing_moves_only_the_keys_of_a_worker_that_left() -> None:
    whole = pool([0] * 8)
    rest = pool([0] * 7)._replace(names=whole.names[:7])
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


class PlainUses:
    """When each prefix was asked for, by number of request and time."""

    def __init__(self, memory_requests: int) -> None:
        self.decay = 1.0 / (1.0 + 1.0 / memory_requests)
        self.times: list[float] = []
        self.requests: dict[int, list[int]] = {}

    def add(self, keys: list[int], now: float) -> None:
        for key in keys:
            self.requests.setdefault(key, []).append(len(self.times))
        self.times.append(now)

    def of(self, key: int, now: float) -> tuple[float, float]:
        numbers = self.requests.get(key, [])
        if not numbers:
            return 0.0, 0.0
        last = len(self.times) - 1
        count = sum(self.decay ** (last - number) for number in numbers)
        edges = [*self.times[numbers[0] :], now]
        seconds = sum(
            self.decay ** (last - numbers[0] - place) * (after - before)
            for place, (before, after) in enumerate(itertools.pairwise(edges))
        )
        return count, seconds


def told_of(uses: PrefixUses, keys: NDArray[np.uint64], now: float) -> NDArray[np.float64]:
    """Requests that had each prefix, and seconds since the first; [2, keys]."""
    ends = np.arange(1, keys.size + 1, dtype=np.int64)
    heat = uses.heat(Prompt(keys.size, keys, ends), ends[::-1], now)
    assert heat.level_tokens.tolist() == ends.tolist()
    return np.array([heat.level_requests, heat.level_seconds])


@pytest.mark.parametrize("memory_requests", [3, 50])
def test_uses_agree_with_a_plain_record(memory_requests: int) -> None:
    """Also when the weights were scaled back: 3 requests of memory do that every hundred."""
    uses, plain, rng = PrefixUses(memory_requests), PlainUses(memory_requests), random.Random(3)
    now = 0.0
    for _ in range(250):
        now += rng.choice([0.0, 0.25, 2.0])
        asked = branching(rng.randrange(3), rng.randrange(13))
        known = [key in plain.requests for key in asked.keys.tolist()]
        assert uses.add(asked.keys, now) == [*known, False].index(False)
        plain.add(asked.keys.tolist(), now)
        probe, later = branching(rng.randrange(4), 12), now + rng.choice([0.0, 1.5])
        told = told_of(uses, probe.keys, later).T.tolist()
        expected = [plain.of(key, later) for key in probe.keys.tolist()]
        assert told == [pytest.approx(pair) for pair in expected]


def test_the_rate_of_a_prefix_is_that_of_late() -> None:
    uses = PrefixUses(memory_requests=50)
    keys = prompt(1, 1).keys
    for second in range(1000):
        uses.add(keys, float(second))
    for tenth in range(500):
        uses.add(keys, 1000.0 + 0.1 * tenth)
    count, seconds = told_of(uses, keys, 1050.0)[:, 0].tolist()
    assert count == pytest.approx(51.0, rel=0.01)
    assert count / seconds == pytest.approx(10.0, rel=0.05)


def test_a_full_table_forgets_what_is_little_used_and_tells_nothing_of_others() -> None:
    uses, plain = PrefixUses(1000, places=256), PlainUses(1000)
    hot = prompt(1, 1).keys
    for number in range(400):
        cold = [prompt(1000 + 8 * number, 8).keys] if number >= 20 else []
        for keys in (hot, *cold):
            uses.add(keys, float(number))
            plain.add(keys.tolist(), float(number))
    assert told_of(uses, hot, 400.0)[0] == pytest.approx([plain.of(key, 400.0)[0] for key in hot])
    every = np.array(sorted(plain.requests), dtype=np.uint64)
    told = told_of(uses, every, 400.0)
    assert 128 < np.count_nonzero(told[0]) <= 256
    for key, count, seconds in zip(every.tolist(), *told.tolist(), strict=True):
        assert count == 0.0 or (count, seconds) == pytest.approx(plain.of(key, 400.0))


def test_what_was_known_and_is_held_no_more_counts_as_lost() -> None:
    history = PlacementHistory()
    whole = prompt()
    history.record(1, whole, whole.tokens, 0, 0.0)
    assert history.lost_share == 0.0
    history.record(1, whole, 1, whole.tokens - 1, 1.0)
    assert history.lost_share == 0.0
    history.record(2, whole, whole.tokens, 0, 2.0)
    assert history.lost_share == pytest.approx((whole.tokens - 1) / whole.tokens / 3)
    history.record(2, prompt(500), whole.tokens, 0, 3.0)
    assert history.lost_share == pytest.approx((whole.tokens - 1) / whole.tokens / 4)


def branching(branch: int, blocks: int) -> Prompt:
    """Branches 0 and 1 share their first four blocks, 2 has no block in common with them."""
    keys = np.arange(1 + 1000 * branch, 1 + 1000 * branch + blocks, dtype=np.uint64)
    if branch == 1:
        keys[:4] = np.arange(1, 5)[: keys[:4].size]
    return Prompt(blocks * BLOCK, keys, np.arange(1, blocks + 1, dtype=np.int64) * BLOCK)


@pytest.mark.parametrize(("seed", "count"), [(0, 20), (1, 20), (2, 200), (3, 200)])
def test_pending_prompts_agree_with_a_plain_record(seed: int, count: int) -> None:
    """Whatever is asked for lies within the memory; what is older is forgotten."""
    rng = random.Random(seed)
    pending, plain = PendingPrompts(10.0, 2**30), {}
    workers = np.array([rng.getrandbits(64) for _ in range(count)], dtype=np.uint64)
    for step in range(300):
        now = 0.25 * step
        sent = branching(rng.randrange(3), rng.randrange(13))
        worker = int(workers[rng.randrange(1 + step * count // 300)])
        pending.add(worker, sent, now)
        plain |= {(worker, key): now for key in sent.keys.tolist()}
        asked = branching(rng.randrange(3), rng.randrange(13))
        some = workers[[rng.randrange(count) for _ in range(rng.randrange(count))]]
        since = np.array([now - rng.choice([0.0, 1.0, 4.1, 10.0]) for _ in range(some.size)])
        held = np.array([rng.choice([0, 5 * BLOCK]) for _ in range(some.size)], dtype=np.int64)
        told = pending.tokens(some, asked, since, held).tolist()
        each = zip(some.tolist(), since.tolist(), held.tolist(), told, strict=True)
        for name, time, at_least, tokens in each:
            was_sent = [plain.get((name, key), NEVER) >= time for key in asked.keys.tolist()]
            assert tokens == max(at_least, BLOCK * [*was_sent, False].index(False))
    pending.add(1, prompt(1, 0), 1000.0)
    assert pending.nbytes == 0


def test_pending_prompts_are_bounded_and_forget_the_oldest() -> None:
    pending, asks = PendingPrompts(1e9, 100_000), [branching(n, 10) for n in range(2, 400)]
    worker, none = np.array([7], dtype=np.uint64), np.zeros(1, dtype=np.int64)
    for number, asked in enumerate(asks):
        pending.add(7, asked, float(number))
        assert pending.nbytes <= 100_000
    found = [int(pending.tokens(worker, asked, np.zeros(1), none)[0]) for asked in asks]
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

    def route(
        self, hashes: tuple[BlockHash, ...], avoid: frozenset[WorkerId] = frozenset()
    ) -> Route:
        hits = np.zeros(len(self.names), dtype=np.int64)
        workers = WorkersView(self.roster, hits, self.loads.loads(self.rows))
        demand, keys = Demand(len(hashes) * BLOCK, 32), np.array(hashes, dtype=np.uint64)
        view = ClusterView(workers, 0)
        return self.chooser.choose(view, demand, keys, avoid, self.rng)

    def ask(self, hashes: tuple[BlockHash, ...], avoid: frozenset[WorkerId] = frozenset()) -> str:
        route = self.route(hashes, avoid)
        chosen = route.decode.worker_id
        self.loads.dispatch(
            self.clock.now(),
            prefill=chosen,
            decode=chosen,
            prefill_tokens=route.prefill_tokens,
            kv_tokens=len(hashes) * BLOCK,
        )
        return chosen


def test_what_was_sent_counts_before_any_event_tells_of_it() -> None:
    cluster = Cluster(4)
    first = cluster.ask(HASHES)
    assert cluster.ask(HASHES) == first


def test_what_a_worker_told_of_counts_as_if_it_were_sent_from_here() -> None:
    for name in Cluster(4).names:
        cluster = Cluster(4)
        cluster.chooser.expect(name, np.array(HASHES, dtype=np.uint64))
        assert cluster.ask(HASHES) == name


def test_what_was_sent_from_here_and_is_told_of_counts_once() -> None:
    cluster = Cluster(4)
    name = cluster.ask(HASHES)
    nbytes = cluster.chooser._history._pending.nbytes
    cluster.chooser.expect(WorkerId(name), np.array(HASHES, dtype=np.uint64))
    assert cluster.chooser._history._pending.nbytes == nbytes
    assert cluster.route(HASHES).held_tokens == len(HASHES) * BLOCK


@pytest.mark.parametrize(("computing", "counts_s"), [(0, 1.0), (4000, 10.0)])
def test_what_a_worker_told_of_is_forgotten_like_what_was_sent(
    computing: int, counts_s: float
) -> None:
    """At once after it has nothing left to compute; else an event may tell of it yet."""

    def held_after(seconds: float) -> int:
        cluster = Cluster(1)
        accounts = KvAccounts(10_000, 0, 0, 0, 0, 10_000, 0, 0, 64)
        cluster.loads.report(WorkerId("w0"), 0.0, WorkerLoad(waiting_tokens=computing), accounts)
        cluster.chooser.expect(WorkerId("w0"), np.array(HASHES, dtype=np.uint64))
        cluster.clock.advance(seconds)
        return cluster.route(HASHES).held_tokens

    assert held_after(counts_s - 0.01) == len(HASHES) * BLOCK
    assert held_after(counts_s + 0.01) == 0


@pytest.mark.parametrize("computing", [0, 4000])
def test_a_new_process_has_nothing_of_what_its_name_was_sent_before(computing: int) -> None:
    cluster, name = Cluster(1), WorkerId("w0")
    cluster.ask(HASHES)
    cluster.clock.advance(0.1)
    cluster.loads.add(name, cluster.clock.now())
    cluster.rows = cluster.loads.rows_of(cluster.names)
    accounts = KvAccounts(10_000, 0, 0, 0, 0, 10_000, 0, 0, 64)
    load = WorkerLoad(waiting_tokens=computing)
    cluster.loads.report(name, cluster.clock.now(), load, accounts)
    assert cluster.route(HASHES).held_tokens == 0
    assert cluster.route(HASHES).held_tokens == len(HASHES) * BLOCK


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
