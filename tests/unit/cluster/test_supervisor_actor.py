from __future__ import annotations

import asyncio

import pytest

from cluster import supervisor_actor
from cluster.supervisor import Supervisor
from cluster.supervisor_actor import SupervisorActor
from kvferry.config import ClusterConfig, to_mapping
from tests.support.fake_members import MemoryStore


@pytest.fixture(autouse=True)
def own_logging(monkeypatch):
    """The actor configures its process's logging, which here is that of all tests."""
    monkeypatch.setattr(supervisor_actor, "configure_logging", lambda _process: None)


class NoLauncher:
    def __init__(self, config):
        pass

    async def launch(self, spec, launch, config):
        raise OSError("nothing starts here")

    async def living(self):
        return []


async def run_actor(exits):
    exited = asyncio.Event()

    def exit_process(code):
        exits.append(code)
        exited.set()

    actor = SupervisorActor(to_mapping(ClusterConfig()), NoLauncher, MemoryStore, exit_process)
    await actor.start()
    return actor, exited


def test_a_supervisor_that_fails_ends_its_process(monkeypatch):
    async def fail(self):
        raise ValueError("a bug of ours")

    exits = []

    async def scenario():
        _, exited = await run_actor(exits)
        async with asyncio.timeout(60):
            await exited.wait()

    monkeypatch.setattr(Supervisor, "run", fail)
    asyncio.run(scenario())
    assert exits == [1]


@pytest.mark.parametrize("stops", [0, 1])
def test_a_supervisor_that_stops_or_is_cancelled_does_not(stops):
    exits = []

    async def scenario():
        actor, _ = await run_actor(exits)
        for _ in range(stops):
            await actor.stop()

    asyncio.run(scenario())
    assert exits == []
