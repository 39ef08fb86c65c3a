from __future__ import annotations

import contextlib

import pytest

from cluster import cli, ray_cluster
from cluster.commands import rollout
from cluster.commands.rollout import show_rollout
from kvferry.errors import WorkerUnavailable
from router.cluster_control import RolloutReport


def report(phase="running", replaced=0, to_replace=2, detail="", changes=("cache.rows",)):
    return RolloutReport(phase, 1, replaced, to_replace, detail, changes)


class FakeSupervisor:
    """Tells of a rollout step by step."""

    def __init__(self, *told):
        self.told = list(told)
        self.applied = []

    def apply(self, config, drain_s):
        self.applied.append((config, drain_s))
        return self.told.pop(0)

    def rollout(self):
        return self.told.pop(0)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(rollout, "ROLLOUT_CHECK_INTERVAL_S", 0.0)


def running(monkeypatch, supervisor):
    connected = contextlib.nullcontext(supervisor)
    monkeypatch.setattr(ray_cluster, "running_supervisor", lambda config: connected)


def test_up_changes_a_cluster_that_runs_and_shows_each_step_once(monkeypatch, capsys):
    steps = (
        *(report(detail="decode-0 drains"), report(detail="decode-0 drains")),
        *(report(replaced=1, detail="prefill-0 drains"), report("done", replaced=2)),
    )
    supervisor = FakeSupervisor(*steps)
    running(monkeypatch, supervisor)
    cli.main(["up", "--cache.rows", "32", "--model.path", "/model", "--drain-s", "7"])
    assert capsys.readouterr().out.splitlines() == [
        "kvferry cluster 'kvferry' runs already",
        "changes: cache.rows",
        "revision 1 running, 0 of 2 replaced: decode-0 drains",
        "revision 1 running, 1 of 2 replaced: prefill-0 drains",
        "revision 1 done, 2 of 2 replaced",
    ]
    ((config, drain_s),) = supervisor.applied
    assert (config.cache.rows, config.model.path, drain_s) == (32, "/model", 7.0)


def test_up_with_the_same_settings_says_so(monkeypatch, capsys):
    running(monkeypatch, FakeSupervisor(report("done", to_replace=0, changes=())))
    cli.main(["up"])
    assert "nothing differs" in capsys.readouterr().out


def test_up_does_not_wait_if_told_so(monkeypatch, capsys):
    running(monkeypatch, FakeSupervisor(report(detail="decode-0 drains")))
    cli.main(["up", "--no-wait"])
    assert capsys.readouterr().out.splitlines()[-1].endswith("decode-0 drains")


def test_up_starts_a_cluster_where_there_is_none(monkeypatch):
    class Started(Exception):
        pass

    def bring_up(config, clock):
        raise Started

    running(monkeypatch, None)
    monkeypatch.setattr(ray_cluster, "bring_up", bring_up)
    with pytest.raises(Started):
        cli.main(["up"])


def test_a_rollout_that_fails_is_an_error(capsys):
    failed = report("failed", detail="decode-1 does not come up")
    with pytest.raises(WorkerUnavailable, match="decode-1 does not come up"):
        show_rollout(report(), lambda: failed, is_awaited=True)
    assert capsys.readouterr().out.startswith("changes: cache.rows\n")
