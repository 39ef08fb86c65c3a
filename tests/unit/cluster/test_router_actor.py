from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster import router_actor as router_actor_module
from cluster.members import RouterSpec
from cluster.router_actor import RouterActor
from kvferry.config import ClusterConfig, to_mapping
from kvferry.errors import ConfigError
from kvferry.router_config import SmgConfig


class FakeRouter:
    def __init__(self):
        self.told = []

    async def wind_down(self, grace_s):
        self.told.append(grace_s)

    async def stop(self):
        self.told.append("stop")


def test_requests_have_the_grace_that_is_set(monkeypatch):
    monkeypatch.setattr(router_actor_module, "configure_logging", lambda name: None)
    config = ClusterConfig()
    config = replace(config, router=replace(config.router, stop_grace_s=7.5))
    router = FakeRouter()

    async def scenario():
        actor = RouterActor(to_mapping(config), RouterSpec("r", "127.0.0.1", 0, 0), control=None)
        actor._router = router
        await actor.stop()
        assert await actor.wait_until_ended(0.0)

    asyncio.run(scenario())
    assert router.told == [7.5, "stop"]


class TakenPorts:
    """Stands for the doors: which pairs of ports are taken, and which were tried."""

    def __init__(self, actor, *taken):
        self.actor = actor
        self.taken = taken
        self.tried = []

    async def open_at(self, settings, attempt):
        ports = self.actor._spec.ports_of(attempt)
        self.tried.append(ports)
        if ports in self.taken:
            raise ConfigError("router.port", "is taken")
        return ports


def router_actor(monkeypatch, spec, *taken, **router):
    monkeypatch.setattr(router_actor_module, "configure_logging", lambda name: None)
    config = ClusterConfig()
    config = replace(config, router=replace(config.router, **router))
    actor = RouterActor(to_mapping(config), spec, control=None)
    doors = TakenPorts(actor, *taken)
    monkeypatch.setattr(actor, "_open_doors_at", doors.open_at)
    return actor, doors


def test_a_further_router_of_a_node_takes_the_next_ports(monkeypatch):
    spec = RouterSpec("router-2", "auto", 7000, 7001, port_tries=3)
    actor, doors = router_actor(monkeypatch, spec, (7000, 7001), (7002, 7003))
    assert asyncio.run(actor._open_doors(None)) == (7004, 7005)
    assert doors.tried == [(7000, 7001), (7002, 7003), (7004, 7005)]


def test_a_router_alone_says_which_port_is_taken(monkeypatch):
    actor, doors = router_actor(
        monkeypatch, RouterSpec("router-0", "auto", 7000, 7001), (7000, 7001)
    )
    with pytest.raises(ConfigError):
        asyncio.run(actor._open_doors(None))
    assert len(doors.tried) == 1


@pytest.mark.parametrize(
    ("setting", "bound", "announced"),
    [
        ("auto", "10.0.0.7", "10.0.0.7"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0", "10.0.0.7"),
    ],
)
def test_the_front_doors_know_the_address_that_is_bound(monkeypatch, setting, bound, announced):
    monkeypatch.setattr(router_actor_module, "configure_logging", lambda name: None)
    spec = RouterSpec("router-0", setting, 0, 0)
    actor = RouterActor(to_mapping(ClusterConfig()), spec, None, lambda: "10.0.0.7")
    assert actor._config.router.host == bound
    assert actor._announced_host == announced


def test_a_router_of_no_node_is_on_loopback(monkeypatch):
    actor, _ = router_actor(monkeypatch, RouterSpec("router-0", "auto", 0, 0))
    assert actor._config.router.host == "127.0.0.1"


def test_the_port_for_smg_moves_along(monkeypatch):
    spec = RouterSpec("router-1", "auto", 7002, 7003, port_tries=2)
    actor, _ = router_actor(monkeypatch, spec, port=7000, smg=SmgConfig(port=8000))
    assert [actor._smg(attempt).port for attempt in range(2)] == [8002, 8004]
    actor, _ = router_actor(monkeypatch, spec, port=7000)
    assert actor._smg(1).port == 0
