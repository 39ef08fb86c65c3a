"""The file for Ray's cluster launcher, and every `ray start` in deploy/, by Ray's own checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from kvferry.config import load_config
from tests.support.kubernetes_schemas import documents_of
from tests.support.ray_command_line import (
    RefusedByRay,
    arguments_of_kuberay,
    check_ray_arguments,
    check_ray_command,
)

DEPLOY = Path(__file__).parents[3] / "deploy"


def _launcher() -> dict[str, Any]:
    text = (DEPLOY / "ray" / "cluster-launcher.yaml").read_text(encoding="utf-8")
    launcher: dict[str, Any] = yaml.safe_load(text)
    return launcher


def test_ray_takes_the_file() -> None:
    prepared = prepare_config(_launcher())
    validate_config(prepared)
    assert prepared["available_node_types"]["local.cluster.node"]["max_workers"] == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"max_worker": 3},
        {"max_workers": "three"},
        {"head_start_ray_commands": [["ray", "stop"]]},
    ],
)
def test_the_check_finds_seeded_errors(changes: dict[str, Any]) -> None:
    # Ray fills in what is missing first, and has to be told all.
    with pytest.raises((jsonschema.ValidationError, TypeError)):
        validate_config({**prepare_config(_launcher()), **changes})


def test_its_commands_are_commands_of_ray() -> None:
    launcher = _launcher()
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert [check_ray_command(line) for line in launcher[commands]] == ["stop", "start"]


def test_it_hands_over_a_configuration_that_loads() -> None:
    (file,) = _launcher()["file_mounts"].values()
    assert load_config(DEPLOY.parent / file, {}, {}).router.security.api_keys


def test_parameters_for_kuberay_are_flags_of_ray() -> None:
    (cluster,) = documents_of(DEPLOY / "kubernetes" / "base" / "ray-cluster.yaml")
    groups = cluster["spec"]["workerGroupSpecs"]
    check_ray_arguments(
        "start",
        ["--head", *arguments_of_kuberay(cluster["spec"]["headGroupSpec"]["rayStartParams"])],
    )
    for group in groups:
        check_ray_arguments(
            "start", ["--address=x:6379", *arguments_of_kuberay(group["rayStartParams"])]
        )
    router = next(each for each in groups if each["groupName"] == "router")
    assert '--resources={"kvferry_router": 1}' in arguments_of_kuberay(router["rayStartParams"])


@pytest.mark.parametrize("line", ["ray start --hed", "ray start --port=x", "ray begin"])
def test_the_check_of_command_lines_finds(line: str) -> None:
    with pytest.raises(RefusedByRay):
        check_ray_command(line)
