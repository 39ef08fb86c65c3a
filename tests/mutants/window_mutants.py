"""Bugs of the prefix index with a sliding window."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TREE = "mem_cache/window_radix_cache.py"
_CACHE = "mem_cache/kv_cache.py"
_CACHE_TESTS = ("tests/unit/mem_cache/test_window_kv_cache.py",)
_TREE_TESTS = ("tests/unit/mem_cache/test_window_radix_cache.py",)
_CACHE = "mem_cache/kv_cache.py"
_CACHE_TESTS = ("tests/unit/mem_cache/test_window_kv_cache.py",)

WINDOW_MUTANTS = (
    Mutant(
        "tombstone-usable",
        "A match has slots for every position that is still read.",
        _TREE,
        "            elif self.window.needed_from(node.end) >= live_from:\n",
        "            else:\n",
        _TREE_TESTS,
    ),
    Mutant(
        "tombstones-pile-up",
        "A node without slots stays only while paths lead through it.",
        _TREE,
        "        self._prune(node)\n        return slots\n",
        "        return slots\n",
        _TREE_TESTS,
    ),
    Mutant(
        "filled-tombstone-not-told",
        "Routers are told of a block that has slots again.",
        _TREE,
        "            self._log.stored(node.block_digests)\n",
        "",
        _TREE_TESTS,
    ),
    Mutant(
        "tombstone-advertised",
        "Routers never count on a tombstone.",
        _TREE,
        "block for node in self.nodes() if node.on_device for block in node.block_hashes",
        "block for node in self.nodes() for block in node.block_hashes",
        _TREE_TESTS,
    ),
    Mutant(
        "lock-reaches-left-of-the-window",
        "A lock protects what is in the window, whole edges of it, and nothing else.",
        _TREE,
        "        self._cut(node, start)\n"
        "        while node.parent is not None and node.end > start:\n"
        "            assert node.on_device",
        "        while node.parent is not None and node.end > start:\n"
        "            assert node.on_device",
        _TREE_TESTS,
    ),
    Mutant(
        "window-one-too-short",
        "A token reads exactly the last tokens of the window, itself included.",
        "mem_cache/attention_window.py",
        "max(0, length - self.tokens + 1)",
        "max(0, length - self.tokens + 2)",
        ("tests/unit/mem_cache/test_attention_window.py",),
    ),
    Mutant(
        "window-never-slides",
        "What has left the window is given up before slots are taken.",
        _CACHE,
        "self._slides = tree.window.tokens is not None",
        "self._slides = False",
        _CACHE_TESTS,
    ),
    Mutant(
        "own-slots-left-behind",
        "A request's own slots come free when they leave the window.",
        _CACHE,
        "            self.allocator.free(self.rows.read(row, kv.cache_protected_len, start))\n",
        "",
        _CACHE_TESTS,
    ),
    Mutant(
        "window-slides-under-a-pin",
        "A pinned row keeps what the handoff reads.",
        _CACHE,
        "kv.pins > 0 or kv.inbound:",
        "kv.inbound:",
        _CACHE_TESTS,
    ),
    Mutant(
        "row-reads-left-of-the-window",
        "Entries left of the window are the dummy slot's.",
        _CACHE,
        "np.zeros(start - kv.window_start, dtype=np.int64))\n",
        "self.rows.read(row, kv.window_start, start))\n",
        _CACHE_TESTS,
    ),
    Mutant(
        "window-slides-under-a-handoff",
        "What a handoff reads or fills is kept, whatever has left the window.",
        _CACHE,
        "if start == kv.window_start or kv.pins > 0 or kv.inbound:",
        "if start == kv.window_start:",
        _CACHE_TESTS,
    ),
    Mutant(
        "dead-slots-in-the-row",
        "Left of its window a row reads the dummy slot, never one that is another's by now.",
        _CACHE,
        "        self.rows.write(row, kv.window_start, "
        "np.zeros(start - kv.window_start, dtype=np.int64))\n",
        "",
        _CACHE_TESTS,
    ),
    Mutant(
        "nothing-dies-early",
        "Own slots left of the window come free while the request lives.",
        _CACHE,
        "            self.allocator.free(self.rows.read(row, kv.cache_protected_len, start))\n",
        "",
        _CACHE_TESTS,
    ),
)
