"""Views of workers in the console's words: ids resolved to names, tokens to text where asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvferry.handoff_view import HandoffView
    from kvferry.ids import Incarnation, WorkerId
    from kvferry.tree_view import NodeView, TreeView
    from router.api.console.shapes import HandoffOut, HandoffsOut, NodeOut, TreeOut
    from router.api.console.worker_views import FleetHandoffs

_Key = tuple[str, int, "Incarnation", "Incarnation"]


def tree_out(
    worker_id: WorkerId, view: TreeView, text_of: Callable[[Sequence[int]], str] | None
) -> TreeOut:
    """`text_of` decodes tokens; None: texts are not asked for."""
    return {
        "worker": worker_id,
        "path": [str(node_id) for node_id in view.path],
        "path_tokens": view.path_tokens,
        "evictable": view.evictable,
        "protected": view.protected,
        "whole": view.is_whole,
        "duration_ms": round(view.duration_ms, 3),
        "nodes": [_node_out(node, text_of) for node in view.nodes],
    }


def _node_out(node: NodeView, text_of: Callable[[Sequence[int]], str] | None) -> NodeOut:
    return {
        "id": str(node.node_id),
        "parent": str(node.parent_id),
        "start": node.start,
        "length": node.length,
        "locks": node.lock_ref,
        "hits": node.hits,
        "access": node.last_access,
        "children": node.children,
        "device": node.on_device,
        "host": node.on_host,
        "priority": node.priority,
        "namespace": node.namespace,
        "tokens": list(node.tokens),
        "text": None if text_of is None else text_of(node.tokens),
    }


@dataclass(slots=True)
class _Sides:
    """What each side of one handoff told; at least one of them did."""

    source: HandoffView | None = None
    sink: HandoffView | None = None


def handoffs_out(told: FleetHandoffs, names: Mapping[Incarnation, WorkerId]) -> HandoffsOut:
    """Both sides of each together, oldest first. `names` of the workers that are known."""
    sides: dict[_Key, _Sides] = {}
    for view in told.views:
        key = (view.request_id, view.attempt, view.source_incarnation, view.sink_incarnation)
        both = sides.setdefault(key, _Sides())
        if view.is_source:
            both.source = view
        else:
            both.sink = view
    handoffs = [_handoff_out(key, both, names) for key, both in sides.items()]
    handoffs.sort(key=lambda each: -each["age_s"])
    return {
        "handoffs": handoffs,
        "workers_asked": told.asked,
        "workers_silent": list(told.silent),
    }


def _handoff_out(key: _Key, both: _Sides, names: Mapping[Incarnation, WorkerId]) -> HandoffOut:
    request_id, attempt, source, sink = key
    known = [view for view in (both.source, both.sink) if view is not None]
    return {
        "key": f"{request_id}#{attempt}:{source:x}:{sink:x}",
        "request_id": request_id,
        "attempt": attempt,
        "source": names.get(source, f"{source:x}"),
        "sink": names.get(sink, f"{sink:x}"),
        "state": _state_of(both),
        "source_state": None if both.source is None else both.source.state,
        "sink_state": None if both.sink is None else both.sink.state,
        "age_s": max(view.age_s for view in known),
        "prompt_tokens": max(view.prompt_tokens for view in known),
        "computed_tokens": 0 if both.source is None else both.source.computed_tokens,
        "moved_bytes": 0 if both.sink is None else both.sink.moved_bytes,
        "total_bytes": 0 if both.sink is None else both.sink.total_bytes,
    }


def _state_of(both: _Sides) -> str:
    """The sink says how far it is; a source that stands alone waits for its receipt."""
    for view in (both.sink, both.source):
        if view is not None:
            return view.state
    raise AssertionError("a handoff that nobody told")
