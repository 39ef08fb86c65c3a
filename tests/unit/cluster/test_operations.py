"""Orders of an operator, over members that are no processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster import supervisor as supervisor_module
from cluster.launcher import StartRefused
from cluster.members import RouterSpec, WorkerSpec
from cluster.operations import Operations
from kvferry.errors import ConfigError, InvalidInput, RolloutRunning, UnknownWorker
from kvferry.ids import WorkerId
from kvferry.membership import Role
from tests.support.fake_members import DECODE, ROUTER, config_of, supervise, until

PREFILL = WorkerSpec(WorkerId("prefill-0"), Role.PREFILL, 1.0, 0.0, 1)
OTHER = WorkerSpec(WorkerId("decode-1"), Role.DECODE, 1.0, 0.0, 1)
ALL = (ROUTER, PREFILL, DECODE)
DRAIN_S = 30.0


@pytest.fixture(autouse=True)
def quick_drain(monkeypatch):
    monkeypatch.setattr(supervisor_module, "_DRAIN_POLL_S", 0.005)


async def complete(supervisor):
    return await until(supervisor, lambda view: view.is_complete)


async def over(supervisor, operations):
    while operations.report().phase == "running":
        view = supervisor.view()
        assert any(
            w.role is not Role.PREFILL and not w.is_draining for w in view.membership.workers
        ), "nobody decodes"
        await supervisor.wait_for_change(view.changes, 0.05)
    return operations.report()


def names(supervisor):
    return {report.name: report.revision for report in supervisor.view().reports}


def test_scaling_starts_and_drains_workers():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        operations = Operations(supervisor)
        more = await operations.scale(Role.DECODE, 3, DRAIN_S)
        assert (more.added, more.draining) == (("decode-1", "decode-2"), ())
        await complete(supervisor)
        less = await operations.scale(Role.DECODE, 1, DRAIN_S)
        assert (less.added, less.draining) == ((), ("decode-2", "decode-1"))
        await until(supervisor, lambda view: len(view.membership.workers) == 1)
        await launcher.members["decode-2", 1].killed.wait()
        assert launcher.members["decode-2", 1].stops == 1
        none = await operations.scale(Role.PREFILL, 0, DRAIN_S)
        assert (none.added, none.draining) == ((), ())
        with pytest.raises(InvalidInput, match="nobody running who decodes would be left"):
            await operations.scale(Role.DECODE, 0, DRAIN_S)
        assert names(supervisor) == {"router-0": 0, "decode-0": 0}

    supervise(scenario)


def test_scaling_counts_by_what_workers_are_used_for():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        operations = Operations(supervisor)
        await operations.set_role("prefill-0", Role.DECODE)
        assert await operations.scale(Role.DECODE, 2, DRAIN_S) == await operations.scale(
            Role.DECODE, 2, DRAIN_S
        )
        assert (await operations.scale(Role.PREFILL, 1, DRAIN_S)).added == ("prefill-1",)

    supervise(scenario, specs=ALL)


def test_workers_are_restarted_one_after_the_other():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        operations = Operations(supervisor)
        begun = await operations.restart((), DRAIN_S)
        assert (begun.phase, begun.replaced, begun.to_replace) == ("running", 0, 2)
        for order in (
            operations.restart((), DRAIN_S),
            operations.add_worker(Role.DECODE),
            operations.apply(config_of(), DRAIN_S),
            operations.scale(Role.DECODE, 2, DRAIN_S),
        ):
            with pytest.raises(RolloutRunning):
                await order
        told = await over(supervisor, operations)
        assert (told.phase, told.replaced, told.to_replace) == ("done", 2, 2)
        assert names(supervisor) == {"router-0": 0, "decode-1": 1, "prefill-1": 1}
        assert launcher.members["router-0", 1].stops == 0
        assert launcher.members["decode-0", 1].stops == 1

    supervise(scenario, specs=ALL)


def test_without_room_a_worker_drains_first_and_comes_back_under_its_name():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        launcher.room = False
        operations = Operations(supervisor)
        await operations.restart(("decode-1",), DRAIN_S)
        assert (await over(supervisor, operations)).phase == "done"
        assert names(supervisor) == {"router-0": 0, "decode-0": 0, "decode-1": 1}
        assert ("decode-1", 2) in launcher.members
        # The only one that decodes has a successor all the same: CPUs can be shared.
        await operations.scale(Role.DECODE, 1, DRAIN_S)
        await until(supervisor, lambda view: len(view.membership.workers) == 1)
        await operations.restart((), DRAIN_S)
        assert (await over(supervisor, operations)).phase == "done"
        assert names(supervisor) == {"router-0": 0, "decode-2": 2}

    supervise(scenario, specs=(ROUTER, DECODE, OTHER))


def test_a_new_worker_that_does_not_come_up_stops_the_roll():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        launcher.options = {"refusal": StartRefused("cache.memory_bytes: too small", True)}
        operations = Operations(supervisor)
        await operations.apply(config_of(cache={"memory_bytes": 1000}), DRAIN_S)
        told = await over(supervisor, operations)
        assert told.phase == "failed"
        assert "decode-1 does not come up: cache.memory_bytes: too small" in told.detail
        assert names(supervisor) == {"router-0": 0, "prefill-0": 0, "decode-0": 0}
        assert supervisor.view().is_complete
        assert supervisor.configs.current == config_of()
        launcher.options = {}
        await operations.apply(config_of(cache={"memory_bytes": 2000}), DRAIN_S)
        assert (await over(supervisor, operations)).phase == "done"
        assert {each for each, _ in launcher.members} >= {"decode-2", "prefill-1"}

    supervise(scenario, specs=ALL)


def test_one_that_came_back_and_does_not_come_up_becomes_what_it_was():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        launcher.room = False
        refusal = StartRefused("cache.memory_bytes: too small", True)
        launcher.refuse_when = lambda config: refusal if config.cache.rows == 7 else None
        operations = Operations(supervisor)
        await operations.apply(config_of(cache={"rows": 7}), DRAIN_S)
        assert (await over(supervisor, operations)).phase == "failed"
        await complete(supervisor)
        assert names(supervisor) == {"router-0": 0, "decode-0": 0, "decode-1": 0}

    supervise(scenario, specs=(ROUTER, DECODE, OTHER))


def test_another_configuration_replaces_whom_it_concerns():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        operations = Operations(supervisor)
        same = await operations.apply(config_of(), DRAIN_S)
        assert (same.phase, same.changes) == ("done", ())
        await operations.apply(config_of(workers={"decode": {"count": 1, "threads": 2}}), DRAIN_S)
        told = await over(supervisor, operations)
        assert (told.phase, told.changes) == ("done", ("workers.decode.threads",))
        assert names(supervisor) == {"router-0": 0, "prefill-0": 0, "decode-1": 2}
        assert launcher.configs["decode-1", 1].workers.decode.threads == 2

    supervise(scenario, specs=ALL)


def test_another_model_has_routers_and_workers_of_its_own():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        operations = Operations(supervisor)
        await operations.apply(config_of(model={"path": "/another"}), DRAIN_S)
        assert (await over(supervisor, operations)).phase == "done"
        assert names(supervisor) == {"router-1": 1, "decode-1": 1, "prefill-1": 1}
        old, new = launcher.members["router-0", 1], launcher.members["router-1", 1]
        assert isinstance(new.spec, RouterSpec)
        assert (new.spec.port, new.spec.is_successor) == (7000, True)
        while not old.memberships.empty():
            assert {w.worker_id for w in old.memberships.get_nowait().workers} <= {
                "decode-0",
                "prefill-0",
            }
        first = new.memberships.get_nowait()
        assert {w.worker_id for w in first.workers} == {"decode-1", "prefill-1"}
        assert old.log.index("router-0 retires") < old.log.index("decode-0 stops")

    supervise(scenario, specs=ALL)


def test_another_model_without_room_for_both():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        launcher.room = False
        operations = Operations(supervisor)
        await operations.apply(config_of(model={"path": "/another"}), DRAIN_S)
        assert (await over(supervisor, operations)).phase == "done"
        assert names(supervisor) == {"router-1": 1, "decode-1": 1, "prefill-0": 1}

    supervise(scenario, specs=ALL)


def test_another_model_that_does_not_come_up_leaves_the_old_one():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        refusal = StartRefused("model.path: is not there", True)
        launcher.refuse_when = lambda config: refusal if config.model.path == "/none" else None
        operations = Operations(supervisor)
        await operations.apply(config_of(model={"path": "/none"}), DRAIN_S)
        assert (await over(supervisor, operations)).phase == "failed"
        assert names(supervisor) == {"router-0": 0, "prefill-0": 0, "decode-0": 0}
        assert launcher.members["router-0", 1].stops == 0

    supervise(scenario, specs=ALL)


def test_settings_of_the_router_replace_it_alone():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        operations = Operations(supervisor)
        await operations.apply(config_of(router={"policy": "round_robin"}), DRAIN_S)
        assert (await over(supervisor, operations)).phase == "done"
        assert names(supervisor) == {"router-1": 1, "prefill-0": 0, "decode-0": 0}
        assert launcher.members["decode-0", 1].stops == 0

    supervise(scenario, specs=ALL)


def test_counts_and_settings_at_once():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        operations = Operations(supervisor)
        config = config_of(
            workers={"prefill": {"count": 2}, "decode": {"count": 1}}, cache={"rows": 32}
        )
        await operations.apply(config, DRAIN_S)
        assert (await over(supervisor, operations)).phase == "done"
        await complete(supervisor)
        assert names(supervisor) == {
            "router-0": 0,
            "prefill-1": 1,
            "decode-1": 1,
            "prefill-2": 1,
        }

    supervise(scenario, specs=ALL)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"router": {"port": 50077}}, "router.port"),
        ({"worker_host": "10.0.0.1"}, "worker_host"),
    ],
)
def test_what_cannot_be_changed_is_refused(more, field):
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        with pytest.raises(ConfigError, match="cannot be changed while the cluster runs") as caught:
            await Operations(supervisor).apply(config_of(**more), DRAIN_S)
        assert caught.value.field == field
        assert supervisor.configs.revision == 0

    supervise(scenario, specs=ALL)


def test_what_needs_new_routers_is_refused_where_they_cannot_take_over():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        config = config_of(cache={"rows": 32}, router={"policy": "round_robin"})
        with pytest.raises(ConfigError, match="kvferry down") as caught:
            await Operations(supervisor).apply(config, DRAIN_S)
        assert caught.value.field == "router.policy"
        assert supervisor.configs.revision == 0
        await Operations(supervisor).apply(config_of(cache={"rows": 32}), DRAIN_S)
        assert supervisor.configs.revision == 1

    supervise(scenario, specs=(*ALL, replace(ROUTER, name="router-1")))


def test_strangers_are_not_restarted():
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        with pytest.raises(UnknownWorker):
            await Operations(supervisor).restart(("decode-7",), DRAIN_S)

    supervise(scenario)


def test_orders_wait_for_the_record(monkeypatch):
    async def scenario(supervisor, launcher):
        await complete(supervisor)
        saved = []
        monkeypatch.setattr(supervisor.recorder._store, "save", lambda text: _append(saved, text))
        await Operations(supervisor).add_worker(Role.DECODE)
        assert "decode-1" in saved[-1]

    supervise(scenario)


async def _append(saved, text):
    await asyncio.sleep(0.01)
    saved.append(text)
