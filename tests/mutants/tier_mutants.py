"""Bugs of the host tier: KV that isn't there yet, slots with two owners, copies that are lost."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TREE = "mem_cache/tiered_radix_cache.py"
_TIER = "mem_cache/host_tier.py"
_CACHE = "mem_cache/kv_cache.py"
_COPIER = "mem_cache/copier.py"
_COPIER_TESTS = ("tests/unit/mem_cache/test_copier.py",)
_TESTS = (
    "tests/unit/mem_cache/test_load_back.py",
    "tests/unit/mem_cache/test_kv_cache_tiers.py",
)

TIER_MUTANTS = (
    Mutant(
        "host-hit-as-device-hit",
        "KV on the host is no hit until it is loaded.",
        _TREE,
        "        device = self._last_on_device(best)\n",
        "        device = best\n",
        _TESTS,
    ),
    Mutant(
        "host-hit-not-told",
        "What was loaded for a request is told apart from what was on the device.",
        _CACHE,
        "            waiter.kv.host_hit_len += waiter.kv.prefix_len - before\n",
        "",
        _TESTS,
    ),
    Mutant(
        "locked-after-making-room",
        "What is to be loaded is locked before room is made for it.",
        _TIER,
        "        self.tree.lock(device)\n"
        "        self.tree.host_lock(node)\n"
        "        slots = take(node.end - device.end)\n",
        "        slots = take(node.end - device.end)\n"
        "        self.tree.lock(device)\n"
        "        self.tree.host_lock(node)\n",
        _TESTS,
    ),
    Mutant(
        "freed-while-it-is-written",
        "Device slots that a copy reads are not freed before it has ended.",
        _TIER,
        "                self._end(copy, self.copier.finish(copy))\n",
        "                continue\n",
        _TESTS,
    ),
    Mutant(
        "loading-in-no-account",
        "Slots reserved for a load are an account of their own.",
        _CACHE,
        "loading=0 if self.tier is None else self.tier.loading",
        "loading=0",
        _TESTS,
    ),
    Mutant(
        "failed-load-used",
        "What could not be loaded is computed.",
        _TIER,
        "if not is_good or edge.on_device:",
        "if edge.on_device:",
        _TESTS,
    ),
    Mutant(
        "loaded-over-published",
        "What was published during a load stays; the load's slots go back.",
        _TIER,
        "if not is_good or edge.on_device:",
        "if not is_good:",
        _TESTS,
    ),
    Mutant(
        "failed-write-kept",
        "The host holds what was copied whole.",
        _TIER,
        "if error is None and (before.parent is None or before.on_host):",
        "if before.parent is None or before.on_host:",
        _TESTS,
    ),
    Mutant(
        "host-has-gaps",
        "What a path has on the host is a prefix of it.",
        _TIER,
        "if error is None and (before.parent is None or before.on_host):",
        "if error is None:",
        _TESTS,
    ),
    Mutant(
        "failed-write-leaks",
        "Host slots of a copy that failed go back.",
        _TIER,
        "            self.tree.host_slots.free(transfer.host_slots)\n",
        "            pass\n",
        _TESTS,
    ),
    Mutant(
        "load-outlives-its-waiters",
        "A load that nobody waits for is given up.",
        _CACHE,
        "            self.tier.forget(kv)\n",
        "",
        _TESTS,
    ),
    Mutant(
        "evict-below-the-device",
        "What a path has on the device is a prefix of it.",
        _TREE,
        "            and node.device_children == 0\n",
        "",
        ("tests/unit/mem_cache/test_eviction.py",),
    ),
    Mutant(
        "host-evicts-locked",
        "Host slots that a load reads are not evicted.",
        _TREE,
        "            node.host_lock_ref == 0\n            and node.host_children == 0\n",
        "            node.host_children == 0\n",
        _TESTS,
    ),
    Mutant(
        "split-forgets-the-copy",
        "Both parts of an edge that is split are as much in a copy as the edge was.",
        _TREE,
        "        upper.in_flight = lower.in_flight\n",
        "",
        _TESTS,
    ),
    Mutant(
        "extended-while-loading",
        "A request that is being loaded computes nothing.",
        _CACHE,
        '        assert kv.loading_len == 0, f"{kv} is being loaded"\n'
        "        assert kv.committed_len <= new_len <= self.context_length, (\n",
        "        assert kv.committed_len <= new_len <= self.context_length, (\n",
        _TESTS,
    ),
    Mutant(
        "cancelled-and-still-running",
        "A copy that was cancelled touches no memory any more: its slots are another's.",
        _COPIER,
        "        if not self._withdraw(copy):\n            self._await(copy)\n",
        "        self._withdraw(copy)\n",
        _COPIER_TESTS,
    ),
    Mutant(
        "failure-swallowed",
        "A copy that failed is reported with its reason.",
        _COPIER,
        "            return error\n",
        "            return None\n",
        _COPIER_TESTS,
    ),
)
