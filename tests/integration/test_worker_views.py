"""What real workers show of their index and their handoffs, over real gRPC."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.config import SchedulerConfig
from kvferry.errors import InvalidInput
from kvferry.limits import CONSOLE_TREE_NODES_MAX
from kvferry.membership import Role
from kvferry.tree_view import TreeQuery
from router.grpc_worker_client import GrpcWorkerClient
from tests.support.digest_cluster import digest_cluster, digest_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.membership import WorkerInfo
    from tests.support.in_process_cluster import InProcessCluster

PAGE = 4
COMMON = list(range(100, 140))


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    config = digest_config(PAGE, 2048, scheduler=SchedulerConfig())
    with digest_cluster(config, (Role.PREFILL, Role.DECODE)) as running:
        yield running


def ask(info: WorkerInfo, call: str, *arguments: Any) -> Any:
    async def main() -> Any:
        client = GrpcWorkerClient(info)
        try:
            return await getattr(client, call)(*arguments, 20.0)
        finally:
            await client.close()

    return asyncio.run(main())


def test_the_index_of_a_worker(cluster: InProcessCluster) -> None:
    for tail in ([1, 2, 3, 4], [5, 6, 7, 8]):
        cluster.generate([*COMMON, *tail, 9], max_tokens=2)
    view = ask(cluster.infos[0], "tree", TreeQuery(100, 100, 4))
    (top,) = (node for node in view.nodes if node.parent_id == 0)
    assert (top.length, top.children, top.tokens) == (len(COMMON), 2, (100, 101, 102, 103))
    assert {node.tokens for node in view.nodes if node.parent_id == top.node_id} == {
        (1, 2, 3, 4),
        (5, 6, 7, 8),
    }
    assert view.is_whole
    below = ask(cluster.infos[0], "tree", TreeQuery(100, 100, 0, (top.node_id,)))
    assert (below.path_tokens, len(below.nodes)) == (len(COMMON), 2)


def test_a_worker_bounds_what_it_is_asked_for(cluster: InProcessCluster) -> None:
    with pytest.raises(InvalidInput) as caught:
        ask(cluster.infos[0], "tree", TreeQuery(CONSOLE_TREE_NODES_MAX + 1, 1, 0))
    assert "nodes_max" in str(caught.value)


def test_workers_at_rest_show_no_handoffs(cluster: InProcessCluster) -> None:
    cluster.generate([*COMMON, 9], max_tokens=2)
    cluster.wait_idle()
    assert [ask(info, "handoffs") for info in cluster.infos] == [(), ()]
