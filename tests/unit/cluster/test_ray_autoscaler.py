"""What Ray's autoscaler is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster import ray_autoscaler
from kvferry.config import WorkerGroupConfig, WorkersConfig

if TYPE_CHECKING:
    import pytest


def test_each_worker_is_asked_for_as_the_more_demanding_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ray_autoscaler, "request_resources", lambda **what: asked.append(what))
    groups = WorkersConfig(
        prefill=WorkerGroupConfig(cpus=1.0, gpus=1.0), decode=WorkerGroupConfig(cpus=4.0)
    )
    ray_autoscaler.ask_for_workers(2, groups)
    ray_autoscaler.ask_for_workers(1, WorkersConfig())
    assert asked == [
        {"bundles": [{"CPU": 4.0, "GPU": 1.0}] * 2},
        {"bundles": [{"CPU": 1.0}]},
    ]
