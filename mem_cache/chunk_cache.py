"""The prefix index that holds nothing: sharing switched off, the interface unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mem_cache.tree_node import InsertResult, MatchResult, new_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.ids import ExtraKey, SlotIndices, TokenIds
    from kvferry.kv_events import BlockHash, KvEvent
    from mem_cache.attention_window import AttentionWindow
    from mem_cache.tree_node import TreeNode


class ChunkCache:
    """Takes nothing and finds nothing; each request keeps its slots until its release."""

    def __init__(self, window: AttentionWindow) -> None:
        self.root = new_root()
        self.window = window

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey) -> MatchResult:
        """Nothing is found: the root, length 0."""
        return MatchResult(self.root, self.root, self.root, 0)

    def path_device_indices(self, node: TreeNode, start: int = 0) -> SlotIndices:
        """The root's path is empty."""
        return np.empty(0, dtype=np.int64)

    def lock(self, node: TreeNode, start: int = 0) -> None:
        """The root needs no lock."""
        assert node is self.root, f"{node} is not of this index"

    def unlock(self, node: TreeNode, start: int = 0) -> None:
        """The root needs no lock."""
        assert node is self.root, f"{node} is not of this index"

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
        """Takes nothing: the slots stay with the caller."""
        assert len(token_ids) == len(value), (
            f"check 2: {len(token_ids)} tokens with {len(value)} slots"
        )
        return InsertResult.nothing(self.root)

    def evict(self, num_tokens: int) -> SlotIndices:
        """Has nothing to evict."""
        return np.empty(0, dtype=np.int64)

    def evictable_size(self) -> int:
        """Always 0."""
        return 0

    def protected_size(self) -> int:
        """Always 0."""
        return 0

    def reset(self) -> SlotIndices:
        """Has nothing to drop."""
        return np.empty(0, dtype=np.int64)

    def nodes(self) -> Iterator[TreeNode]:
        """No nodes."""
        return iter(())

    def is_evictable(self, node: TreeNode) -> bool:
        """Never."""
        return False

    def can_find(self, node: TreeNode) -> bool:
        """There is nothing to find."""
        return False

    def take_events(self) -> list[KvEvent]:
        """No events."""
        return []

    def snapshot_blocks(self) -> tuple[BlockHash, ...]:
        """No blocks."""
        return ()

    def digests_to_come(self, token_ids: TokenIds, extra_key: ExtraKey) -> bytes:
        """Nothing will be stored."""
        return b""
