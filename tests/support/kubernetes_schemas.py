"""Whether Kubernetes would take a manifest: by its published schemas, and without a server.

Stricter than the API server: a field that a schema does not know, which the server drops in
silence, is an error here.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

DATA = Path(__file__).parents[1] / "data"
VERSIONS = ("1.29", "1.37")
"""Of Kubernetes: the oldest and the newest that manifests are checked against."""

_CORE = {
    ("v1", "ConfigMap"): "io.k8s.api.core.v1.ConfigMap",
    ("v1", "PersistentVolumeClaim"): "io.k8s.api.core.v1.PersistentVolumeClaim",
    ("v1", "Secret"): "io.k8s.api.core.v1.Secret",
    ("v1", "Service"): "io.k8s.api.core.v1.Service",
    ("networking.k8s.io/v1", "NetworkPolicy"): "io.k8s.api.networking.v1.NetworkPolicy",
    ("policy/v1", "PodDisruptionBudget"): "io.k8s.api.policy.v1.PodDisruptionBudget",
}
_METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_POD = "io.k8s.api.core.v1.Pod"


def documents_of(file: Path) -> list[dict[str, Any]]:
    """All documents of a YAML file."""
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def errors_in(document: dict[str, Any], version: str) -> list[str]:
    """What is wrong with an object, one line each with the path; empty if nothing is."""
    kind = (document.get("apiVersion"), document.get("kind"))
    found = _nulls(document, "")
    if kind == ("ray.io/v1", "RayCluster"):
        return found + _ray_cluster_errors(document, version)
    if kind not in _CORE:
        return [f"no schema for {kind}"]
    return found + _errors(_core_schema(_CORE[kind], version), document, "")


def pod_templates(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By group, the pod templates of a RayCluster; that of the head is named `head`."""
    spec = document["spec"]
    groups = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"], **groups}


def _ray_cluster_errors(document: dict[str, Any], version: str) -> list[str]:
    """By KubeRay's schema, then each pod by the schema of the Kubernetes it runs on."""
    found = _errors(_ray_cluster_schema(), document, "")
    found += _errors(_core_schema(_METADATA, version), document.get("metadata"), "/metadata")
    if found:
        return found
    for group, template in pod_templates(document).items():
        found += _errors(_core_schema(_POD, version), template, f"/{group}/template")
    return found


def _nulls(value: Any, path: str) -> list[str]:
    """Fields without a value, which a server takes for absent and a reader does not."""
    match value:
        case None:
            return [f"{path}: has no value"]
        case dict():
            return [line for key, each in value.items() for line in _nulls(each, f"{path}/{key}")]
        case list():
            return [line for at, each in enumerate(value) for line in _nulls(each, f"{path}/{at}")]
    return []


def _errors(schema: dict[str, Any], value: Any, path: str) -> list[str]:
    return [
        f"{path}/{'/'.join(str(step) for step in error.absolute_path)}: {error.message}"
        for error in _Validator(schema).iter_errors(value)
    ]


@functools.cache
def _definitions(version: str) -> dict[str, Any]:
    return _read(DATA / "kubernetes" / f"definitions-{version}.json.gz")


@functools.cache
def _core_schema(name: str, version: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}", **_definitions(version)}


@functools.cache
def _ray_cluster_schema() -> dict[str, Any]:
    schema = _read(DATA / "kuberay" / "raycluster-v1.json.gz")
    _close(schema)
    # Open in the definition: every server knows what metadata is.
    schema["properties"]["metadata"] = {"type": "object"}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return schema


def _read(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    return value


def _close(node: Any) -> None:
    """Let no object have fields that its schema does not list, where it lists any."""
    if isinstance(node, list):
        for each in node:
            _close(each)
        return
    if not isinstance(node, dict):
        return
    is_schema = isinstance(node.get("properties"), dict) and node.get("type") == "object"
    if is_schema and not node.get("x-kubernetes-preserve-unknown-fields"):
        node.setdefault("additionalProperties", False)
    for each in node.values():
        _close(each)


def _unique_keys(validator: Any, kind: str, value: Any, schema: dict[str, Any]) -> Any:
    """Kubernetes' lists that are maps: no two entries with the same keys."""
    if kind != "map" or not validator.is_type(value, "array"):
        return
    keys = schema["x-kubernetes-list-map-keys"]
    defaults = {key: at.get("default") for key, at in schema["items"].get("properties", {}).items()}
    seen = set()
    for entry in value:
        identity = tuple(str(entry.get(key, defaults.get(key))) for key in keys)
        if identity in seen:
            yield jsonschema.ValidationError(f"{identity} of {keys} is there twice")
        seen.add(identity)


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"x-kubernetes-list-type": _unique_keys}
)
