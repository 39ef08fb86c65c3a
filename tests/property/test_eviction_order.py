"""What the index evicts against a scan of all its nodes, under every policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import EvictionPolicy
from kvferry.kv_events import event_block_tokens
from mem_cache.radix_cache import RadixCache
from tests.support.kv_caches import SHARED, tokens_of

if TYPE_CHECKING:
    from mem_cache.tree_node import TreeNode

pytestmark = pytest.mark.property

RANKS = {
    EvictionPolicy.LRU: lambda node: (node.last_access,),
    EvictionPolicy.LFU: lambda node: (node.hit_count, node.last_access),
    EvictionPolicy.FIFO: lambda node: (node.created_at,),
    EvictionPolicy.FILO: lambda node: (-node.created_at,),
    EvictionPolicy.MRU: lambda node: (-node.last_access,),
    EvictionPolicy.PRIORITY: lambda node: (node.priority, node.last_access),
    EvictionPolicy.SLRU: lambda node: (node.hit_count > 1, node.last_access),
}

PAGE_SIZE = 2
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(
    lambda kinds: [kind for kind in kinds for _ in range(PAGE_SIZE)]
)
INSERT = st.tuples(st.just("insert"), PROMPTS, st.integers(-1, 2))
MATCH = st.tuples(st.just("match"), PROMPTS)
LOCK = st.tuples(st.just("lock"), PROMPTS)
UNLOCK = st.tuples(st.just("unlock"), st.integers(0, 7))
EVICT = st.tuples(st.just("evict"), st.integers(1, 2))
# So that ranks are far apart now and then.
WAIT = st.tuples(st.just("wait"), st.sampled_from((1, 500, 3_000)))
RESET = st.tuples(st.just("reset"))
OPERATIONS = st.sampled_from(
    [INSERT] * 8 + [MATCH] * 3 + [LOCK] * 3 + [UNLOCK] * 2 + [EVICT] * 3 + [WAIT] * 2 + [RESET]
).flatmap(lambda operation: operation)
"""More comes in than goes out."""


@dataclass
class Checked:
    """A tree, whose every eviction is compared with the scan."""

    policy: EvictionPolicy
    tree: RadixCache
    seen: Counter[str]
    locked: list[TreeNode] = field(default_factory=list)
    next_slot: int = 1

    def insert(self, prompt: list[int], priority: int) -> None:
        slots = np.arange(self.next_slot, self.next_slot + len(prompt))
        self.next_slot += len(prompt)
        self.tree.insert(tokens_of(prompt), slots, SHARED, priority=priority)

    def match(self, prompt: list[int]) -> TreeNode:
        before = len(list(self.tree.nodes()))
        match = self.tree.match_prefix(tokens_of(prompt), SHARED)
        self.seen["split"] += len(list(self.tree.nodes())) > before
        return match.last_device_node

    def lock(self, prompt: list[int]) -> None:
        node = self.match(prompt)
        self.tree.lock(node)
        self.locked.append(node)

    def unlock(self, which: int) -> None:
        if self.locked:
            self.tree.unlock(self.locked.pop(which % len(self.locked)))

    def evict(self, times: int) -> None:
        for _ in range(times):
            nodes = list(self.tree.nodes())
            expected = self._next(nodes)
            self.seen["passed over"] += self._passes_over(nodes, expected)
            freed = self.tree.evict(1)
            assert freed.tolist() == (expected.value.tolist() if expected else [])
            self.seen["evicted"] += expected is not None
            self.seen["nothing to evict"] += expected is None

    def reset(self) -> None:
        while self.locked:
            self.unlock(0)
        self.tree.reset()

    def _next(self, nodes: list[TreeNode]) -> TreeNode | None:
        leaves = [node for node in nodes if not node.children and node.lock_ref == 0]
        if not leaves:
            return None
        rank = RANKS[self.policy]
        return min(leaves, key=lambda node: (rank(node), -node.end, node.node_id))

    def _passes_over(self, nodes: list[TreeNode], victim: TreeNode | None) -> bool:
        """Whether a leaf would go before `victim` if it were not locked."""
        rank = RANKS[self.policy]
        locked = [node for node in nodes if not node.children and node.lock_ref > 0]
        return any(victim is None or rank(node) < rank(victim) for node in locked)

    def check(self) -> None:
        nodes = list(self.tree.nodes())
        assert len(self.tree._order) <= 2 * len(nodes) + 64
        for node in nodes:
            assert not self.tree.is_evictable(node) or self.tree.can_find(node)

    def run(self, operation: tuple[object, ...]) -> None:
        match operation:
            case ("insert", list(prompt), int(priority)):
                self.insert(prompt, priority)
            case ("match", list(prompt)):
                self.match(prompt)
            case ("lock", list(prompt)):
                self.lock(prompt)
            case ("unlock", int(which)):
                self.unlock(which)
            case ("evict", int(times)):
                self.evict(times)
            case ("wait", int(ticks)):
                self.tree._tick += ticks
            case ("reset",):
                self.reset()
            case _:
                raise AssertionError(operation)
        self.check()


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_the_scan_finds_the_same_leaf(policy):
    seen: Counter[str] = Counter()

    @given(st.lists(OPERATIONS, min_size=25, max_size=50))
    def run(operations):
        tree = RadixCache(PAGE_SIZE, event_block_tokens(PAGE_SIZE), policy)
        checked = Checked(policy, tree, seen)
        for operation in operations:
            checked.run(operation)
        checked.evict(len(list(tree.nodes())) + 1)

    run()
    wanted = ("split", "evicted", "nothing to evict", "passed over")
    assert min(seen[what] for what in wanted) > 0, seen
