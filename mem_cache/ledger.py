"""The checks that hold the closed loop together, the ledger of a worker.

1 new slots are in range, unique, disjoint from live ones    [allocator, always; here, in full]
2 key and slots have equal length                            [insert, always; here]
3 the row below `cache_protected_len` reads the index's slots, and none left of its window [here]
4 intervals of a row are ordered and disjoint                [release, always; here]
5 evicted nodes are unlocked leaves and give back their length [evict, always]; every unlocked
  leaf can be found by eviction                              [here]
6 a row is used at the generation it was given at            [every call, always; here]
7 protected size is the sum of locked nodes; locks are the live requests' and loads' [here]
8 the accounts add up to the total; rows likewise            [here]
9 with no live request nothing is protected, private, inbound or loading [here]

With a host tier `tier_ledger` has the checks of that, which `audit` runs as well.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mem_cache.errors import LedgerError
from mem_cache.slot_owners import check_owners
from mem_cache.tier_ledger import check_tier
from mem_cache.tree_node import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvferry.accounts import KvAccounts
    from kvferry.ids import SlotIndices
    from mem_cache.host_tier import HostTier
    from mem_cache.req_to_token_pool import ReqToTokenPool
    from mem_cache.request_kv import RequestKV
    from mem_cache.slot_allocator import SlotAllocator
    from mem_cache.tree_node import PrefixCache, TreeNode


class Books(Protocol):
    """What the ledger looks at: the parts of a `KVCache`, which it never changes."""

    rows: ReqToTokenPool
    allocator: SlotAllocator
    tree: PrefixCache
    tier: HostTier | None

    @property
    def page_size(self) -> int:
        """Slots per page."""
        ...

    @property
    def num_slots(self) -> int:
        """Usable slots."""
        ...

    def live_requests(self) -> tuple[RequestKV, ...]:
        """Every request that holds a row."""
        ...

    def accounts(self) -> KvAccounts:
        """Every slot by its owner."""
        ...


def require_live(books: Books, kv: RequestKV) -> int:
    """Ledger check 6, at every call: the request's row, which nobody else was given since."""
    row = kv.req_pool_idx
    if row is None:
        raise LedgerError([f"check 6: {kv} is not open (released before?)"])
    if not books.rows.is_current(row, kv.req_generation):
        raise LedgerError([f"check 6: {kv} has generation {kv.req_generation} of a reused row"])
    return row


def require_path(books: Books, kv: RequestKV) -> None:
    """Ledger check 3 for one request."""
    violations = list(_check_path(books, kv))
    if violations:
        raise LedgerError(violations)


def audit(books: Books) -> None:
    """Run every check in full; raises `LedgerError` that lists all violations."""
    nodes = list(books.tree.nodes())
    violations = [
        *_check_slots(books, nodes),
        *_check_nodes(books, nodes),
        *_check_requests(books),
        *_check_locks(books, nodes),
        *_check_accounts(books),
    ]
    if books.tier is not None:
        violations += check_tier(books.tier, nodes)
    if violations:
        raise LedgerError(violations)


def pinned_slots(live: Iterable[RequestKV]) -> int:
    """Slots that open handoffs read, shared ones counted once."""
    return held_slots(kv for kv in live if kv.pins > 0)


def held_slots(kvs: Iterable[RequestKV]) -> int:
    """Slots that these requests own or lock, shared ones counted once; loads are not counted."""
    seen: set[int] = set()
    count = 0
    for kv in kvs:
        count += kv.private_len
        node = kv.last_node
        while node.parent is not None and node.end > kv.window_start:
            count += 0 if node.node_id in seen else len(node.value)
            seen.add(node.node_id)
            node = node.parent
    return count


def oom_report(books: Books) -> str:
    """Who holds rows and slots: rows, accounts, and each live request's lengths."""
    accounts = books.accounts()
    lines = [
        f"rows: {books.rows.num_free} free of {accounts.rows_total}",
        f"slots: {accounts.free} free ({accounts.free // books.page_size} pages of "
        f"{books.page_size}), {accounts.evictable} evictable, {accounts.protected} protected, "
        f"{accounts.private} private, {accounts.inbound} inbound, {accounts.loading} loading, "
        f"of {accounts.total}",
    ]
    if books.tier is not None:
        host = books.tier.accounts()
        lines.append(
            f"host slots: {host.free} free, {host.evictable} evictable, "
            f"{host.protected} protected, {host.writing} writing, {host.loading} loading, "
            f"of {host.total}"
        )
    lines += [
        f"  {kv.request_id}: kv_allocated_len {kv.allocated_len}, cache_protected_len "
        f"{kv.cache_protected_len}{', inbound' if kv.inbound else ''}"
        f"{', pinned' if kv.pins else ''}"
        for kv in books.live_requests()
    ]
    return "\n".join(lines)


def _check_slots(books: Books, nodes: list[TreeNode]) -> Iterator[str]:
    """Check 1: each usable slot has exactly one owner, and each page one owner."""
    owned: list[tuple[str, SlotIndices]] = [("allocator", books.allocator.free_slots())]
    owned += [(repr(node), node.value) for node in nodes]
    owned += [
        (str(kv.request_id), books.rows.read(row, kv.cache_protected_len, kv.allocated_len))
        for kv in books.live_requests()
        if (row := kv.req_pool_idx) is not None
    ]
    if books.tier is not None:
        loads = (transfer for transfer in books.tier.transfers() if transfer.is_load)
        owned += [(f"load of {load.node!r}", load.slots) for load in loads]
    yield from check_owners(owned, books.page_size, books.num_slots)


def _check_nodes(books: Books, nodes: list[TreeNode]) -> Iterator[str]:
    """Checks 2 and 5, and the shape of the tree."""
    has_window = books.tree.window.tokens is not None
    for node in nodes:
        may_be_elsewhere = books.tier is not None or (has_window and node.children)
        is_elsewhere = may_be_elsewhere and not node.on_device
        if (len(node.key) != TOKEN_BYTES * len(node.value) and not is_elsewhere) or not node.key:
            yield f"check 2: {node} has {len(node.key)} key bytes, {len(node.value)} slots"
        if node.length * TOKEN_BYTES != len(node.key):
            yield f"check 2: {node} has {len(node.key)} key bytes for {node.length} tokens"
        parent = node.parent
        if parent is None or parent.children.get(node.child_key) is not node:
            yield f"{node} is not its parent's child"
        elif node.start != parent.end:
            yield f"{node} does not begin where its parent ends, at {parent.end}"
        if books.tree.is_evictable(node) and not books.tree.can_find(node):
            yield f"check 5: {node} is an unlocked leaf that eviction cannot find"


def _check_requests(books: Books) -> Iterator[str]:
    """Checks 3, 4 and 6, for every live request."""
    for kv in books.live_requests():
        row = kv.req_pool_idx
        if row is None or not books.rows.is_current(row, kv.req_generation):
            yield f"check 6: {kv} is live without its row"
            continue
        try:
            kv.check_intervals()
        except AssertionError as error:
            yield str(error)
        if kv.inbound and kv.cache_protected_len != kv.prefix_len:
            yield f"{kv}: published while inbound"
        yield from _check_path(books, kv)


def _check_path(books: Books, kv: RequestKV) -> Iterator[str]:
    row = kv.req_pool_idx
    assert row is not None, "checked by the caller"
    locks_nothing = kv.last_node is books.tree.root and kv.cache_protected_len == kv.window_start
    if kv.last_node.end != kv.cache_protected_len and not locks_nothing:
        yield f"check 3: {kv} is locked up to {kv.last_node}"
        return
    if books.rows.read(row, 0, kv.window_start).any():
        yield f"check 3: the row of {kv} reads slots left of its window"
    path = books.tree.path_device_indices(kv.last_node, kv.window_start)
    ours = books.rows.read(row, kv.window_start, kv.cache_protected_len)
    if not np.array_equal(ours, path):
        yield f"check 3: the row of {kv} does not read the index's slots"


def _check_locks(books: Books, nodes: list[TreeNode]) -> Iterator[str]:
    """Check 7: each lock count is that of live requests and loads whose path goes through."""
    holders = [(str(kv), kv.last_node, kv.window_start) for kv in books.live_requests()]
    if books.tier is not None:
        holders += [
            (f"load of {load.node!r}", load.above, 0)
            for load in books.tier.transfers()
            if load.is_load and load.above is not None
        ]
    expected: Counter[int] = Counter()
    for name, node, start in holders:
        while node.parent is not None:
            expected[node.node_id] += node.end > start
            node = node.parent
        if node is not books.tree.root:
            yield f"check 7: {name} is locked in a tree that is gone"
    for node in nodes:
        if node.lock_ref != expected[node.node_id]:
            yield f"check 7: {node} should have lock_ref {expected[node.node_id]}"
    yield from _check_sizes(books, nodes)


def _check_sizes(books: Books, nodes: list[TreeNode]) -> Iterator[str]:
    protected = sum(len(node.value) for node in nodes if node.lock_ref > 0)
    evictable = sum(len(node.value) for node in nodes if node.lock_ref == 0)
    for name, told, counted in (
        ("protected", books.tree.protected_size(), protected),
        ("evictable", books.tree.evictable_size(), evictable),
    ):
        if told != counted:
            yield f"check 7: {name} size is told as {told}, nodes hold {counted}"


def _check_accounts(books: Books) -> Iterator[str]:
    """Checks 8 and 9."""
    accounts = books.accounts()
    if not accounts.is_conserved:
        yield f"check 8: accounts do not add up: {accounts}"
    if books.rows.num_free + accounts.rows_live != accounts.rows_total:
        yield f"check 8: {books.rows.num_free} free rows and {accounts.rows_live} live ones"
    rows = [*books.rows.free_rows(), *(kv.req_pool_idx for kv in books.live_requests())]
    if len(set(rows)) != len(rows) or 0 in rows:
        yield f"check 8: a row has two owners, or is row 0: {rows}"
    if accounts.rows_live == 0 and not accounts.is_idle:
        yield f"check 9: idle, but not all is given back: {accounts}"
