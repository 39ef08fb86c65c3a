"""Shows a part of the index of KV, when somebody asks, between two steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mem_cache.tree_view import view_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.clock import Clock
    from kvferry.errors import KvferryError
    from kvferry.tree_view import TreeQuery, TreeView
    from mem_cache.tree_node import PrefixCache


@dataclass(frozen=True, slots=True)
class ShowTree:
    """Event: somebody looks. `deliver` is called on the engine thread, once, unless the engine
    ends before it comes to this; it must not block."""

    query: TreeQuery
    deliver: Callable[[TreeView], None]


class TreeViewer:
    """A `LoopPart`, so that no step changes the index meanwhile."""

    def __init__(self, tree: PrefixCache, clock: Clock) -> None:
        self._tree = tree
        self._clock = clock

    def handle(self, event: object) -> bool:
        """Takes `ShowTree`."""
        match event:
            case ShowTree(query, deliver):
                started = self._clock.now()
                view = view_tree(self._tree, query)
                deliver(replace(view, duration_ms=1000.0 * (self._clock.now() - started)))
            case _:
                return False
        return True

    def tick(self) -> None:
        """Nothing: it only answers."""

    def next_deadline(self) -> float | None:
        """None: it waits for nothing."""
        return None

    def flush(self) -> None:
        """Nothing: views leave as they are made."""

    def stop(self, error: KvferryError) -> None:
        """Nothing: who waits for a view asks by itself whether the engine lives."""
