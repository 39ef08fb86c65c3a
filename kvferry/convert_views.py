"""Views of a worker for people, to protobuf and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.handoff_view import HandoffView
from kvferry.ids import Attempt, Incarnation, RequestId
from kvferry.rpc.v1 import worker_pb2 as worker
from kvferry.tree_view import NodeView, TreeQuery, TreeView

if TYPE_CHECKING:
    from collections.abc import Iterable

_NODE = tuple(name for name in NodeView.__dataclass_fields__ if name != "tokens")
_HANDOFF = tuple(HandoffView.__dataclass_fields__)


def tree_query_to_wire(query: TreeQuery) -> worker.WorkerTreeRequest:
    """Field by field."""
    return worker.WorkerTreeRequest(
        nodes_max=query.nodes_max,
        depth_max=query.depth_max,
        tokens_max=query.tokens_max,
        path=query.path,
    )


def tree_query_from_wire(message: worker.WorkerTreeRequest) -> TreeQuery:
    """The inverse of `tree_query_to_wire`. Bounds are not checked here."""
    return TreeQuery(message.nodes_max, message.depth_max, message.tokens_max, tuple(message.path))


def tree_view_to_wire(view: TreeView, incarnation: int) -> worker.WorkerTreeResponse:
    """`incarnation`: of the worker whose index it is."""
    return worker.WorkerTreeResponse(
        incarnation=incarnation,
        path=view.path,
        path_tokens=view.path_tokens,
        nodes=[_node_to_wire(node) for node in view.nodes],
        evictable=view.evictable,
        protected=view.protected,
        is_whole=view.is_whole,
        duration_ms=view.duration_ms,
    )


def tree_view_from_wire(message: worker.WorkerTreeResponse) -> TreeView:
    """The inverse of `tree_view_to_wire`, but for the incarnation."""
    return TreeView(
        path=tuple(message.path),
        path_tokens=message.path_tokens,
        nodes=tuple(_node_from_wire(node) for node in message.nodes),
        evictable=message.evictable,
        protected=message.protected,
        is_whole=message.is_whole,
        duration_ms=message.duration_ms,
    )


def _node_to_wire(node: NodeView) -> worker.TreeNode:
    fields = {name: getattr(node, name) for name in _NODE}
    return worker.TreeNode(**fields, tokens=node.tokens)


def _node_from_wire(message: worker.TreeNode) -> NodeView:
    fields = {name: getattr(message, name) for name in _NODE}
    return NodeView(**fields, tokens=tuple(message.tokens))


def handoffs_to_wire(
    views: Iterable[HandoffView], incarnation: int
) -> worker.WorkerHandoffsResponse:
    """`incarnation`: of the worker that tells them."""
    return worker.WorkerHandoffsResponse(
        incarnation=incarnation,
        handoffs=[
            worker.HandoffProgress(**{name: getattr(view, name) for name in _HANDOFF})
            for view in views
        ],
    )


def handoffs_from_wire(message: worker.WorkerHandoffsResponse) -> tuple[HandoffView, ...]:
    """The inverse of `handoffs_to_wire`, but for the incarnation."""
    return tuple(_handoff_from_wire(each) for each in message.handoffs)


def _handoff_from_wire(message: worker.HandoffProgress) -> HandoffView:
    return HandoffView(
        RequestId(message.request_id),
        Attempt(message.attempt),
        Incarnation(message.source_incarnation),
        Incarnation(message.sink_incarnation),
        is_source=message.is_source,
        state=message.state,
        age_s=message.age_s,
        prompt_tokens=message.prompt_tokens,
        computed_tokens=message.computed_tokens,
        moved_bytes=message.moved_bytes,
        total_bytes=message.total_bytes,
    )
