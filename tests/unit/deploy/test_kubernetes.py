"""The manifests: what Kubernetes and KubeRay would say to them, and whether they fit together."""

from __future__ import annotations

import copy
import functools
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from kvferry.config import load_config
from tests.support.kubernetes_schemas import VERSIONS, documents_of, errors_in, pod_templates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.config import ClusterConfig

BASE = Path(__file__).parents[3] / "deploy" / "kubernetes" / "base"
FILES = ("ray-cluster.yaml", "service.yaml", "disruption-budgets.yaml", "network-policies.yaml")
RAY_CONTAINER = 0
"""KubeRay runs Ray in the first container of a pod."""


@functools.cache
def _objects() -> tuple[dict[str, Any], ...]:
    return tuple(document for name in FILES for document in documents_of(BASE / name))


def _of_kind(kind: str) -> Iterator[dict[str, Any]]:
    return (each for each in _objects() if each["kind"] == kind)


@functools.cache
def _ray_cluster() -> dict[str, Any]:
    (cluster,) = _of_kind("RayCluster")
    return cluster


def _pod_labels(group: str) -> dict[str, str]:
    """What KubeRay puts on the pods of a group, and what their template adds."""
    of_template = pod_templates(_ray_cluster())[group]["metadata"]["labels"]
    return {
        "ray.io/cluster": _ray_cluster()["metadata"]["name"],
        "ray.io/group": "headgroup" if group == "head" else group,
        "ray.io/node-type": "head" if group == "head" else "worker",
        **of_template,
    }


def _groups_selected(labels: dict[str, str]) -> set[str]:
    return {
        group
        for group in pod_templates(_ray_cluster())
        if labels.items() <= _pod_labels(group).items()
    }


def _containers() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(group, pod, container) of every container."""
    return [
        (group, template["spec"], container)
        for group, template in pod_templates(_ray_cluster()).items()
        for container in template["spec"]["containers"]
    ]


def _port_names(group: str) -> dict[str, int]:
    pod = pod_templates(_ray_cluster())[group]["spec"]
    return {
        port["name"]: port["containerPort"]
        for container in pod["containers"]
        for port in container.get("ports", ())
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_and_has_no_unknown_field(version: str) -> None:
    found = {
        f"{each['kind']} {each['metadata']['name']}": errors_in(each, version)
        for each in _objects()
    }
    assert len(found) == len(_objects()) > len(FILES)
    assert not {name: errors for name, errors in found.items() if errors}


def _head(cluster: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][
        0
    ]
    return container


def _worker(cluster: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = cluster["spec"]["workerGroupSpecs"][0]
    return group


SEEDED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a field that there is none of": lambda c: c["spec"].update(workerGroups=[]),
    "a misspelt field of a group": lambda c: _worker(c).update(minReplica=1),
    "a misspelt field of a container": lambda c: _head(c).update(livenesProbe={}),
    "a probe of no kind": lambda c: _head(c)["livenessProbe"].update(gprc={"port": 1}),
    "a text for a number": lambda c: _worker(c).update(replicas="two"),
    "a number for a text of Ray": lambda c: _worker(c)["rayStartParams"].update({"num-cpus": 1}),
    "a malformed quantity": lambda c: _head(c)["resources"]["limits"].update(memory="2 GB"),
    "no containers": lambda c: c["spec"]["headGroupSpec"]["template"]["spec"].pop("containers"),
    "a mount without a path": lambda c: _head(c)["volumeMounts"][0].pop("mountPath"),
    "two mounts at one path": lambda c: _head(c)["volumeMounts"].append(
        _head(c)["volumeMounts"][0]
    ),
    "an unknown kind of metadata": lambda c: c["metadata"].update(label={}),
    "a volume of nothing": lambda c: c["spec"]["headGroupSpec"]["template"]["spec"]["volumes"][
        0
    ].update(emptyDir=None),
}


@pytest.mark.parametrize("what", SEEDED)
def test_the_check_of_ray_clusters_finds(what: str) -> None:
    cluster = copy.deepcopy(_ray_cluster())
    SEEDED[what](cluster)
    assert errors_in(cluster, VERSIONS[-1])


def test_the_check_of_other_objects_finds_seeded_errors() -> None:
    for each in _objects():
        if each["kind"] == "RayCluster":
            continue
        misspelt = copy.deepcopy(each)
        misspelt["spec"]["selectors"] = {}
        assert errors_in(misspelt, VERSIONS[0]), each["kind"]
    assert errors_in({"apiVersion": "policy/v1beta1", "kind": "PodDisruptionBudget"}, VERSIONS[0])


def _kustomized(folder: Path) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "gpu-cluster"])
def test_kubectl_builds_valid_objects(folder: str, tmp_path: Path) -> None:
    built = _kustomized(BASE.parent / folder)
    assert {each["metadata"]["name"] for each in _objects()} < {
        each["metadata"]["name"] for each in built
    }
    assert [line for each in built for line in errors_in(each, VERSIONS[-1])] == []
    (settings,) = (each["data"]["cluster.yaml"] for each in built if each["kind"] == "ConfigMap")
    (tmp_path / "cluster.yaml").write_text(settings)
    config = load_config(tmp_path / "cluster.yaml", {}, {})
    (cluster,) = (each for each in built if each["kind"] == "RayCluster")
    groups = {each["groupName"]: each for each in cluster["spec"]["workerGroupSpecs"]}
    _check_room(config, groups)
    path = config.model.path
    for template in (groups["router"]["template"], groups["worker"]["template"]):
        container = template["spec"]["containers"][RAY_CONTAINER]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert path == "/opt/kvferry/model" or any(path.startswith(mount) for mount in mounts)


def _check_room(config: ClusterConfig, groups: dict[str, dict[str, Any]]) -> None:
    """Every worker and every router finds a pod."""
    start = groups["worker"]["rayStartParams"]
    workers = (config.workers.prefill, config.workers.decode, config.workers.both)
    pods = groups["worker"]["replicas"]
    assert sum(each.count * each.cpus for each in workers) <= pods * float(start["num-cpus"])
    gpus = float(start.get("num-gpus", "0"))
    assert sum(each.count * each.gpus for each in workers) <= pods * gpus
    assert config.router.replicas == groups["router"]["replicas"]


def test_kustomization_lists_every_manifest() -> None:
    (kustomization,) = documents_of(BASE / "kustomization.yaml")
    assert sorted(kustomization["resources"]) == sorted(FILES)


def test_services_lead_to_the_ports_of_routers() -> None:
    services = list(_of_kind("Service"))
    assert services
    for service in services:
        assert _groups_selected(service["spec"]["selector"]) == {"router"}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in _port_names("router")


def test_ports_are_those_of_the_configuration() -> None:
    router = load_config(BASE / "cluster.yaml", {}, {}).router
    assert _port_names("router") == {"grpc": router.port, "http": router.http.port}


def test_budgets_can_be_kept_and_are_of_the_kind_that_custom_resources_allow() -> None:
    replicas = {
        each["groupName"]: each["minReplicas"]
        for each in _ray_cluster()["spec"]["workerGroupSpecs"]
    }
    guarded = set()
    for budget in _of_kind("PodDisruptionBudget"):
        assert set(budget["spec"]) == {"minAvailable", "selector"}
        (group,) = _groups_selected(budget["spec"]["selector"]["matchLabels"])
        assert isinstance(budget["spec"]["minAvailable"], int)
        # Of the head none may go; of the others one may, or nobody could ever empty a machine.
        assert budget["spec"]["minAvailable"] == (1 if group == "head" else replicas[group] - 1)
        guarded.add(group)
    assert guarded == set(pod_templates(_ray_cluster()))


def test_network_policies_let_outsiders_reach_routers_only() -> None:
    inside = set()
    for policy in _of_kind("NetworkPolicy"):
        groups = _groups_selected(policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"]["ingress"]:
            for peer in rule["from"]:
                labels = peer.get("podSelector", {}).get("matchLabels", {})
                if "namespaceSelector" not in peer and _groups_selected(labels):
                    inside |= groups
                    continue
                # From elsewhere: to named ports of routers, which ask for keys.
                assert groups == {"router"}
                assert {port["port"] for port in rule["ports"]} <= set(_port_names("router"))
    assert inside == set(pod_templates(_ray_cluster())), "some pod is open to everybody"


def test_every_mount_has_its_volume() -> None:
    for group, pod, container in _containers():
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]}, group


def test_every_file_that_routers_are_told_of_is_mounted() -> None:
    security = load_config(BASE / "cluster.yaml", {}, {}).router.security
    files = [security.tls_certificate, security.tls_key, security.api_keys]
    assert all(files)
    for group, _, container in _containers():
        folders = {mount["mountPath"] for mount in container["volumeMounts"]}
        needed = {str(Path(file).parent) for file in files}
        # And nobody else gets to see them.
        assert needed & folders == (needed if group == "router" else set()), group


def test_no_container_is_privileged_or_root() -> None:
    for group, pod, container in _containers():
        assert pod["securityContext"]["runAsNonRoot"] is True, group
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_all_containers_have_one_image_and_bounds() -> None:
    images = {container["image"] for _, _, container in _containers()}
    assert len(images) == 1
    for _, _, container in _containers():
        assert set(container["resources"]) == {"requests", "limits"}


def test_pods_have_time_for_what_they_do_before_they_stop() -> None:
    for group, pod, container in _containers():
        command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if command and command[0] == "sleep":
            grace_s = load_config(BASE / "cluster.yaml", {}, {}).router.stop_grace_s
            assert grace_s < float(command[1]) < pod["terminationGracePeriodSeconds"], group


def test_probes_ask_ports_that_somebody_listens_at() -> None:
    start = {
        "head": _ray_cluster()["spec"]["headGroupSpec"]["rayStartParams"],
        **{
            each["groupName"]: each["rayStartParams"]
            for each in _ray_cluster()["spec"]["workerGroupSpecs"]
        },
    }
    for group, _, container in _containers():
        of_ray = {6379} if group == "head" else {int(start[group]["node-manager-port"])}
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(name, {})
            if "grpc" in probe:
                assert probe["grpc"]["port"] in of_ray, (group, name)
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] in _port_names(group), (group, name)
    ray_containers = [c for _, _, c in _containers() if c["name"].startswith("ray-")]
    assert all("livenessProbe" in each for each in ray_containers)
    for template in pod_templates(_ray_cluster()).values():
        assert template["spec"]["containers"][RAY_CONTAINER]["name"].startswith("ray-")
