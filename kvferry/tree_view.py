"""A part of a worker's index of KV, as it is shown to people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeQuery:
    """Which part."""

    nodes_max: int
    depth_max: int
    """Edges below the node where it begins."""
    tokens_max: int
    """Of each edge, the first tokens; 0: none."""
    path: tuple[int, ...] = ()
    """Ids of the nodes from below the root to the one where it begins; empty: the root."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One edge with the node that it leads to."""

    node_id: int
    parent_id: int
    """Of the node above; 0 is the root."""
    start: int
    """Tokens of the path before this edge."""
    length: int
    """Tokens of this edge."""
    lock_ref: int
    """Requests and copies in flight that pass through."""
    hits: int
    """Requests that matched it, since it was made."""
    last_access: int
    """A tick of the index, larger the later."""
    children: int
    """All of them, shown or not."""
    on_device: bool
    on_host: bool
    """Neither: a path leads through it, its slots are given up."""
    priority: int
    namespace: str
    """Equal for paths that may share KV; tells nothing else. Empty but below the root."""
    tokens: tuple[int, ...]
    """The first ones of this edge."""


@dataclass(frozen=True, slots=True)
class TreeView:
    """What was there between two steps."""

    path: tuple[int, ...]
    """Where it begins: as much of the path that was asked for as there still is."""
    path_tokens: int
    """Tokens before the part that is shown."""
    nodes: tuple[NodeView, ...]
    """Parents first. Of all nodes the most used, those in use before the others."""
    evictable: int
    """Tokens in the whole index that nobody reads."""
    protected: int
    """Tokens in the whole index that somebody reads."""
    is_whole: bool
    """Whether nothing below the beginning was left out."""
    duration_ms: float = 0.0
    """How long it kept the engine from its next step."""
