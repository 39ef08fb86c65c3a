"""Bugs of the life of a request: open, extend, checkpoint, handoff, release."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_CACHE = "mem_cache/kv_cache.py"
_CACHE_TESTS = ("tests/unit/mem_cache/test_kv_cache.py",)
_PIN_TESTS = ("tests/unit/mem_cache/test_pins.py",)
_FORK_TESTS = ("tests/unit/mem_cache/test_fork.py",)

CACHE_MUTANTS = (
    Mutant(
        "match-the-last-token-too",
        "The last token of a prompt is computed: its logits are needed.",
        _CACHE,
        "limit = len(token_ids) if inbound else max(0, len(token_ids) - 1)",
        "limit = len(token_ids)",
        _CACHE_TESTS,
    ),
    Mutant(
        "recomputed-matches",
        "Who needs the logits of every token matches nothing.",
        _CACHE,
        "        if sharing is Sharing.SHARED:\n",
        "        if sharing is not Sharing.PRIVATE:\n",
        _CACHE_TESTS,
    ),
    Mutant(
        "private-is-published",
        "KV that does not follow from its tokens alone is shared with nobody.",
        _CACHE,
        "if kv.sharing is Sharing.PRIVATE or key_len <= start:",
        "if key_len <= start:",
        _CACHE_TESTS,
    ),
    Mutant(
        "row-not-rewritten",
        "After a checkpoint the row reads the tree's slots, never freed duplicates.",
        _CACHE,
        "        self.allocator.free(result.duplicates)\n"
        "        self.rows.write(row, start, self.tree.path_device_indices(node, start))\n",
        "        self.allocator.free(result.duplicates)\n",
        _CACHE_TESTS,
    ),
    Mutant(
        "duplicate-not-freed",
        "A request's duplicates go back to the allocator.",
        _CACHE,
        "        self.allocator.free(result.duplicates)\n",
        "",
        _CACHE_TESTS,
    ),
    Mutant(
        "duplicate-freed-twice",
        "A slot is freed once.",
        _CACHE,
        "        self.allocator.free(result.duplicates)\n",
        "        self.allocator.free(result.duplicates)\n"
        "        self.allocator.free(result.duplicates)\n",
        _CACHE_TESTS,
    ),
    Mutant(
        "published-beyond-committed",
        "Only what is computed is published.",
        _CACHE,
        "        assert len(token_ids) <= kv.committed_len, "
        'f"{kv} has not computed {len(token_ids)} tokens"\n',
        "",
        _CACHE_TESTS,
    ),
    Mutant(
        "tail-not-freed",
        "The preallocated tail of a request goes back with the rest.",
        _CACHE,
        "self.rows.read(row, kv.cache_protected_len, kv.allocated_len))",
        "self.rows.read(row, kv.cache_protected_len, self.layout.round_up(kv.committed_len)))",
        _CACHE_TESTS,
    ),
    Mutant(
        "release-without-unlock",
        "Nothing stays locked for a request that has ended.",
        _CACHE,
        "        self.tree.unlock(kv.last_node, kv.window_start)\n        del self._live[row]\n",
        "        del self._live[row]\n",
        _CACHE_TESTS,
    ),
    Mutant(
        "unlock-twice",
        "A request undoes its own lock only.",
        _CACHE,
        "        self.tree.unlock(kv.last_node, kv.window_start)\n        del self._live[row]\n",
        "        self.tree.unlock(kv.last_node, kv.window_start)\n"
        "        self.tree.unlock(kv.last_node, kv.window_start)\n"
        "        del self._live[row]\n",
        _CACHE_TESTS,
    ),
    Mutant(
        "old-lock-kept",
        "A request holds one lock, on the end of its published part.",
        _CACHE,
        "        self.tree.unlock(kv.last_node, kv.window_start)\n"
        "        kv.last_node = node\n"
        "        kv.cache_protected_len = node.end\n",
        "        kv.last_node = node\n        kv.cache_protected_len = node.end\n",
        _CACHE_TESTS,
    ),
    Mutant(
        "inbound-published",
        "KV of a handoff that has not committed is published by nobody.",
        _CACHE,
        "        assert not kv.inbound, "
        'f"{kv}: inbound KV is published only after its handoff committed"\n',
        "",
        _CACHE_TESTS,
    ),
    Mutant(
        "inbound-counted-as-private",
        "Slots reserved for a handoff are an account of their own.",
        _CACHE,
        "            else:\n                private += kv.private_len\n",
        "            private += kv.private_len\n",
        _CACHE_TESTS,
    ),
    Mutant(
        "released-while-read",
        "Slots that a handoff reads stay until it has closed.",
        _CACHE,
        '        assert kv.pins == 0, f"{kv} is still read by a handoff"\n',
        "",
        _CACHE_TESTS,
    ),
    Mutant(
        "duplicates-freed-although-pinned",
        "A handoff took note of a row's slots: none is freed before it has closed.",
        _CACHE,
        "            keeps_own=kv.pins > 0,\n",
        "            keeps_own=False,\n",
        _PIN_TESTS,
    ),
    Mutant(
        "duplicates-freed-although-pinned-under-a-window",
        "The same with a sliding window.",
        "mem_cache/window_radix_cache.py",
        "if keeps_own and any(",
        "if not keeps_own and any(",
        _PIN_TESTS,
    ),
    Mutant(
        "pinned-rows-publish-nothing",
        "A pinned prompt is published as long as nobody else has it.",
        "mem_cache/radix_cache.py",
        "if keeps_own and self._device_end(held) > owned_from:",
        "if keeps_own:",
        _PIN_TESTS,
    ),
    Mutant(
        "host-edges-taken-for-duplicates",
        "What is on the host alone has no slots that could replace the caller's.",
        "mem_cache/tiered_radix_cache.py",
        "        return self._last_on_device(held).end\n",
        "        return held.end\n",
        _PIN_TESTS,
    ),
    Mutant(
        "partial-page-shared",
        "Two samples write their next token to different pages.",
        _CACHE,
        "        self.rows.write(row, shared, own)\n",
        "        self.rows.write(\n"
        "            row, shared, self.rows.read(parents_row, shared, shared + len(own))\n"
        "        )\n",
        _FORK_TESTS,
    ),
    Mutant(
        "partial-page-not-copied",
        "A sample's own page begins as its parent's is.",
        _CACHE,
        "            pool.copy(copied, own[: computed - shared])\n",
        "            assert len(copied) <= len(own), pool\n",
        _FORK_TESTS,
    ),
    Mutant(
        "fork-forgets-the-lock",
        "Each sample locks what it shares: it may outlive the others.",
        _CACHE,
        "kv.sharing, kv.priority)\n        self.tree.lock(kv.last_node, kv.window_start)\n",
        "kv.sharing, kv.priority)\n",
        _FORK_TESTS,
    ),
    Mutant(
        "evicts-before-it-refuses",
        "Being out of slots changes nothing.",
        _CACHE,
        "        if evictable < shortage:\n",
        "        if evictable < shortage and len(self.tree.evict(shortage)) < shortage:\n",
        _CACHE_TESTS,
    ),
)
