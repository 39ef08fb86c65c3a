from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cluster import ray_runtime
from cluster.ray_cluster import for_any_node, take_down
from cluster.ray_runtime import NoRayCluster
from kvferry.clock import MonotonicClock
from kvferry.config import BUNDLED_MODEL, ClusterConfig, load_config
from kvferry.ray_config import RayConfig
from tests.support.ports import free_port


def test_files_have_the_same_names_everywhere_and_each_node_its_own_bundled_model(monkeypatch):
    monkeypatch.chdir("/")
    config = for_any_node(
        load_config(
            None,
            {},
            {
                "model.adapters": "{sql: etc/sql}",
                "router.security.tls_certificate": "etc/cert.pem",
                "router.security.tls_key": "etc/key.pem",
            },
        )
    )
    assert config.model.path == BUNDLED_MODEL
    assert config.model.adapters == {"sql": "/etc/sql"}
    security = config.router.security
    assert (security.tls_certificate, security.tls_key) == ("/etc/cert.pem", "/etc/key.pem")
    assert security.api_keys == ""


def test_a_local_model_is_named_in_full(monkeypatch):
    monkeypatch.chdir("/")
    model = dataclasses.replace(ClusterConfig().model, path="~/model")
    config = for_any_node(dataclasses.replace(ClusterConfig(), model=model))
    assert config.model.path == str(Path.home() / "model")


def test_a_head_that_is_not_there_is_known_at_once(monkeypatch):
    monkeypatch.setattr(ray_runtime, "stop_ray", lambda: None)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(NoRayCluster, match=f"ray.address: {address}"):
        take_down(RayConfig(address=address), MonotonicClock())
