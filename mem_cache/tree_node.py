"""A node of the prefix index, what a search in it answers, and the interface of an index."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from kvferry.ids import ExtraKey
from kvferry.kv_events import unpack_hashes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.ids import SlotIndices, TokenIds
    from kvferry.kv_events import BlockHash, KvEvent
    from mem_cache.attention_window import AttentionWindow
    from mem_cache.copier import Copy

TOKEN_BYTES = 4
"""Keys are kept as the bytes of little-endian int32 tokens: `bytes.startswith` compares a whole
edge in native code without making an array, which is most of what a search does."""

ChildKey: TypeAlias = bytes
"""First unit (token or page) of an edge; below the root, the extra key and the first unit. Units
of a tree are equally long, so it is clear where the extra key ends."""


NO_SLOTS: SlotIndices = np.empty(0, dtype=np.int64)
"""What a node holds in a tier where it is not resident. Shared, hence read-only."""
NO_SLOTS.flags.writeable = False


class TreeNode:
    """An edge of the tree: the tokens `[start, end)` of every path through it, and their slots.

    The tree owns the slots in `value` and `host_value` (int64, one for each token of `key`; empty
    in a tier where the node is not resident). `lock_ref` counts the requests and copies in flight
    whose path passes through; above 0 the device slots are protected. `host_lock_ref` does the same
    for the host slots.
    """

    __slots__ = (
        "block_digests",
        "child_key",
        "children",
        "created_at",
        "device_children",
        "end",
        "extra_key",
        "hit_count",
        "host_children",
        "host_lock_ref",
        "host_value",
        "in_flight",
        "key",
        "last_access",
        "length",
        "lock_ref",
        "node_id",
        "parent",
        "priority",
        "value",
    )

    def __init__(
        self, node_id: int, parent: TreeNode | None, key: bytes, value: SlotIndices, tick: int
    ) -> None:
        self.node_id = node_id
        self.parent = parent
        self.key = key
        self.value = value
        self.host_value = NO_SLOTS
        self.length = len(key) // TOKEN_BYTES
        self.end: int = (0 if parent is None else parent.end) + self.length
        self.children: dict[ChildKey, TreeNode] = {}
        self.child_key: ChildKey = b""
        self.extra_key = ExtraKey("")
        self.lock_ref = 0
        self.host_lock_ref = 0
        self.hit_count = 0
        self.priority = 0
        self.created_at = tick
        self.last_access = tick
        self.device_children = 0
        """Children with device slots; counted by an index of two tiers only, like the next two."""
        self.host_children = 0
        self.in_flight: Copy | None = None
        """The copy between tiers that this edge is part of."""
        self.block_digests = b""
        """Digests of the event blocks that end within `(start, end]`, one after the other."""

    @property
    def start(self) -> int:
        """Tokens of the path before this edge."""
        return self.end - self.length

    @property
    def block_hashes(self) -> list[BlockHash]:
        """Hashes of the event blocks that end within `(start, end]`, first block first."""
        return unpack_hashes(self.block_digests)

    @property
    def on_device(self) -> bool:
        """Whether the tree holds device slots for this edge."""
        return len(self.value) > 0

    @property
    def on_host(self) -> bool:
        """Whether the tree holds host slots for this edge."""
        return len(self.host_value) > 0

    def __repr__(self) -> str:
        return f"TreeNode({self.node_id}: [{self.start}, {self.end}), lock_ref {self.lock_ref})"


def new_root() -> TreeNode:
    """A node of no tokens: where every path begins. It has no parent and is never evicted."""
    return TreeNode(0, None, b"", NO_SLOTS, 0)


class MatchResult(NamedTuple):
    """The longest prefix of a key that the index holds.

    Nodes are borrowed references: lock before the next allocation or eviction. In one tier the
    three nodes are the same, but callers must rely on what each means: KV on the device, KV on
    the host, and the deepest of both. A tuple, because a frozen dataclass takes 1.5 us to make.
    """

    last_device_node: TreeNode
    last_host_node: TreeNode
    best_match_node: TreeNode
    length: int
    """Tokens whose KV is on the device."""


class InsertResult(NamedTuple):
    """What became of a key offered to the index."""

    matched_len: int
    """Leading tokens the index had already on the device; it keeps its own slots for them."""
    last_node: TreeNode
    """Where the key ends in the index now; the root if the index took nothing."""
    duplicates: SlotIndices
    """Slots of the caller's for tokens that the index had already: still the caller's, to free."""

    @staticmethod
    def nothing(root: TreeNode) -> InsertResult:
        """The index took nothing."""
        return InsertResult(0, root, NO_SLOTS)


class PrefixCache(Protocol):
    """An index from token keys to slots that the index owns. Holds no K/V.

    `match_prefix` + `lock` once per request at admission, `insert` + `lock` + `unlock` per
    checkpoint, `unlock` at release, `evict` when slots run out. Keys longer than whole pages
    are cut. All sizes are in tokens, which is to say slots.
    """

    root: TreeNode
    window: AttentionWindow
    """How much of a prefix must have slots for it to be a match: all, but for a sliding window."""

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey) -> MatchResult:
        """Find the longest cached prefix. A write: may split an edge, refreshes access times."""
        ...

    def path_device_indices(self, node: TreeNode, start: int = 0) -> SlotIndices:
        """Slots of the tokens `[start, node.end)` of the path to `node`."""
        ...

    def lock(self, node: TreeNode, start: int = 0) -> None:
        """Protect the tokens `[start, node.end)` of the path to `node`; `start` is a page's."""
        ...

    def unlock(self, node: TreeNode, start: int = 0) -> None:
        """Undo one `lock` of the same node and start."""
        ...

    def insert(
        self,
        token_ids: TokenIds,
        value: SlotIndices,
        extra_key: ExtraKey,
        *,
        owned_from: int = 0,
        priority: int = 0,
        keeps_own: bool = False,
    ) -> InsertResult:
        """Offer slots: `value[owned_from:]`, whole pages of them; what is before is the index's.

        All of them belong to the index from now on, except `duplicates` and, if `last_node` ends
        before the key, those beyond. `priority` raises that of every node of the path. A caller
        that `keeps_own` slots never gets duplicates: where there would be any, nothing is taken.
        """
        ...

    def evict(self, num_tokens: int) -> SlotIndices:
        """Remove unlocked leaves until `num_tokens` slots came free; returns all that did."""
        ...

    def evictable_size(self) -> int:
        """Tokens that eviction could free."""
        ...

    def protected_size(self) -> int:
        """Tokens in locked nodes."""
        ...

    def reset(self) -> SlotIndices:
        """Drop everything; nothing may be locked. Returns the slots that came free."""
        ...

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root, parents first."""
        ...

    def is_evictable(self, node: TreeNode) -> bool:
        """Whether eviction may take this node now."""
        ...

    def can_find(self, node: TreeNode) -> bool:
        """Whether eviction will come across this node: the eviction order has an entry for it."""
        ...

    def take_events(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        ...

    def snapshot_blocks(self) -> tuple[BlockHash, ...]:
        """Hashes of all blocks held, parents first."""
        ...

    def digests_to_come(self, token_ids: TokenIds, extra_key: ExtraKey) -> bytes:
        """Digests of all full blocks of a prompt, none where all are held in some tier. Changes
        nothing, access times neither."""
        ...
