from __future__ import annotations

import asyncio
from dataclasses import replace

from cluster import router_actor as router_actor_module
from cluster.members import RouterSpec
from cluster.router_actor import RouterActor
from kvferry.config import ClusterConfig, to_mapping


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
        await actor.wait_until_ended()

    asyncio.run(scenario())
    assert router.told == [7.5, "stop"]
