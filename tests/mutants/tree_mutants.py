"""Bugs of the prefix index: what it finds, whom it protects, what it evicts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TREE = "mem_cache/radix_cache.py"
_TREE_TESTS = ("tests/unit/mem_cache/test_radix_cache.py",)

TREE_MUTANTS = (
    Mutant(
        "lock-only-last-node",
        "A lock protects the whole path to the root.",
        _TREE,
        "            node.lock_ref += 1\n            node = node.parent\n",
        "            node.lock_ref += 1\n            break\n",
        _TREE_TESTS,
    ),
    Mutant(
        "evict-locked",
        "What a request reads is not evicted.",
        _TREE,
        "return node.lock_ref == 0 and not node.children and node.parent is not None",
        "return not node.children and node.parent is not None",
        _TREE_TESTS,
    ),
    Mutant(
        "evict-inner-node",
        "Only leaves are evicted: a node without its parent is found by nobody.",
        _TREE,
        "return node.lock_ref == 0 and not node.children and node.parent is not None",
        "return node.lock_ref == 0 and node.parent is not None",
        ("tests/unit/mem_cache/test_eviction.py",),
    ),
    Mutant(
        "parent-never-evicted",
        "A parent that lost its last child can be evicted in turn.",
        _TREE,
        "        if self.is_evictable(parent):\n            self._order.add(parent)\n",
        "",
        _TREE_TESTS,
    ),
    Mutant(
        "unlocked-never-evicted",
        "A leaf that is no longer locked can be evicted.",
        _TREE,
        "                if self.is_evictable(node):\n                    self._order.add(node)\n",
        "",
        _TREE_TESTS,
    ),
    Mutant(
        "split-loses-lock",
        "Both parts of a split edge are as locked as the edge was.",
        _TREE,
        "        upper.lock_ref = lower.lock_ref\n",
        "",
        _TREE_TESTS,
    ),
    Mutant(
        "split-keeps-slots",
        "After a split each slot belongs to one of the two nodes.",
        _TREE,
        "        lower.value = lower.value[tokens:].copy()\n",
        "",
        _TREE_TESTS,
    ),
    Mutant(
        "split-keeps-blocks",
        "After a split each event block belongs to one of the two nodes.",
        _TREE,
        "        lower.block_digests = lower.block_digests[told:]\n",
        "",
        _TREE_TESTS,
    ),
    Mutant(
        "extra-key-ignored",
        "Requests with different extra keys never share KV.",
        _TREE,
        "return extra_key.encode() + unit if node is self.root else unit",
        "return unit",
        _TREE_TESTS,
    ),
    Mutant(
        "first-page-decides",
        "An edge is compared whole, not only by the page that finds it.",
        _TREE,
        "if not key.startswith(child.key, offset):\n                child = self._split(",
        "if len(child.key) > len(key) - offset:\n                child = self._split(",
        _TREE_TESTS,
    ),
    Mutant(
        "match-within-a-page",
        "A match is whole pages.",
        _TREE,
        "        return common // self.page_size * self.page_size\n",
        "        return common\n",
        _TREE_TESTS,
    ),
    Mutant(
        "slots-not-copied",
        "The tree owns its slots: a row that is reused does not change them.",
        _TREE,
        "value[parent.end : stop].copy()",
        "value[parent.end : stop]",
        _TREE_TESTS,
    ),
    Mutant(
        "free-what-is-the-trees",
        "Duplicates are those of the request's own slots only.",
        _TREE,
        "return held.end, value[owned_from : held.end]",
        "return held.end, value[: held.end]",
        ("tests/unit/mem_cache/test_kv_cache.py",),
    ),
    Mutant(
        "eviction-not-told",
        "Routers are told of every block that is gone.",
        _TREE,
        "        self._log.removed(node.block_digests)\n",
        "",
        _TREE_TESTS,
    ),
    Mutant(
        "evicted-without-need",
        "No more is evicted than is needed.",
        _TREE,
        "while count < num_tokens:",
        "while count <= num_tokens:",
        ("tests/unit/mem_cache/test_kv_cache.py", "tests/unit/mem_cache/test_radix_cache.py"),
    ),
)
