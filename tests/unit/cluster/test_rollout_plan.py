"""What a new configuration changes, and for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.rollout_plan import change_between, with_hosts_of
from kvferry.config import ClusterConfig, SchedulerConfig
from kvferry.errors import ConfigError
from kvferry.membership import Role

LOCAL = ClusterConfig(worker_host="127.0.0.1")
LOCAL = replace(LOCAL, router=replace(LOCAL.router, host="127.0.0.1"))


def test_hosts_that_are_left_to_the_nodes_stay_as_they_are():
    new = ClusterConfig(scheduler=SchedulerConfig(queue_max=7))
    kept = with_hosts_of(LOCAL, new)
    assert (kept.worker_host, kept.router.host) == ("127.0.0.1", "127.0.0.1")
    assert change_between(LOCAL, kept).names == ("scheduler.queue_max",)


@pytest.mark.parametrize("field", ["worker_host", "router.host"])
def test_a_host_that_is_given_cannot_be_changed(field):
    other = replace(LOCAL, worker_host="10.0.0.1")
    if field == "router.host":
        other = replace(LOCAL, router=replace(LOCAL.router, host="10.0.0.1"))
    with pytest.raises(ConfigError, match="cannot be changed while the cluster runs") as caught:
        change_between(LOCAL, with_hosts_of(LOCAL, other))
    assert caught.value.field == field


def test_a_number_of_workers_replaces_nobody():
    more = replace(LOCAL.workers.decode, count=3)
    change = change_between(LOCAL, replace(LOCAL, workers=replace(LOCAL.workers, decode=more)))
    assert change.counts == {Role.DECODE: 3}
    assert not change.groups
    assert not change.replaces_routers


def test_another_model_is_a_new_lineage():
    change = change_between(LOCAL, replace(LOCAL, model=replace(LOCAL.model, path="/other")))
    assert change.is_new_lineage
    assert change.replaces_routers
    assert change.groups == frozenset(Role)
