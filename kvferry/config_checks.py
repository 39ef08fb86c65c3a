"""What a configuration must keep to: the range of each setting, and which go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.addresses import AUTO, is_wildcard
from kvferry.cores import cores_in
from kvferry.errors import ConfigError
from kvferry.limits import (
    ADAPTER_NAME_CHARACTERS_MAX,
    ADAPTERS_MAX,
    DRAFT_TOKENS_MAX,
    DRAIN_S_MAX,
    PLANNER_ATTAINMENT_MAX,
    PLANNER_INTERVAL_S_MAX,
    REQUESTS_KEPT_MAX,
    ROUTERS_MAX,
    STOP_GRACE_S_MAX,
    TENANT_CHARACTERS_MAX,
)
from kvferry.router_config import ADMIN_TENANT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.config import (
        ClusterConfig,
        HostTierConfig,
        ModelConfig,
        NgramConfig,
        WorkerGroupConfig,
    )
    from kvferry.router_config import RouterConfig, SecurityConfig

_CLASSES = ("interactive", "standard", "batch")
_CLASS_AT_LEAST = {"queue_max": 0, "ttft_limit_s": 0}
_ROLES = ("prefill", "decode", "both")
_GROUP_AT_LEAST = {"count": 0, "cpus": 0, "gpus": 0, "threads": 1, "tensor_parallel": 1}
_AT_LEAST: Mapping[str, float] = (
    {
        f"workers.{role}.{setting}": low
        for role in _ROLES
        for setting, low in _GROUP_AT_LEAST.items()
    }
    | {
        f"router.classes.{name}.{setting}": low
        for name in _CLASSES
        for setting, low in _CLASS_AT_LEAST.items()
    }
    | {
        "model.context_length": 2,
        "cache.page_size": 1,
        "cache.memory_bytes": 1,
        "cache.rows": 1,
        "cache.audit_interval_steps": 0,
        "cache.host.memory_bytes": 0,
        "cache.host.load_back_tokens_min": 1,
        "cache.host.files.bytes_max": 1,
        "scheduler.chunk_tokens": 1,
        "scheduler.itl_limit_ms": 0,
        "scheduler.running_max": 1,
        "scheduler.queue_max": 0,
        "scheduler.output_reserve": 0,
        "speculation.ngram.max_draft": 0,
        "speculation.ngram.match_min": 1,
        "speculation.ngram.step_cost_tokens": 0,
        "handoff.staging_buffer_bytes": 1,
        "handoff.staging_buffers": 1,
        "handoff.links_max": 1,
        "handoff.local_prefill_tokens_max": 0,
        "router.port": 0,
        "router.replicas": 1,
        "router.requests_max": 1,
        "router.stop_grace_s": 0,
        "router.http.port": 0,
        "router.smg.port": 0,
        "router.tenants.concurrent_max": 0,
        "router.tenants.requests_per_minute": 0,
        "router.tenants.tokens_per_minute": 0,
        "tracing.requests_kept": 0,
        "tracing.sample_ratio": 0,
        "planner.prefill_min": 1,
        "planner.decode_min": 1,
        "planner.workers_min": 0,
        "planner.workers_max": 0,
        "planner.margin": 0,
        "planner.hold_s": 0,
        "planner.resize_after_s": 0,
        "planner.drain_s": 0,
        "restart_backoff_s": 0,
    }
)
_CUDA_DTYPES = ("float16", "bfloat16")
"""What FlashInfer's attention computes with."""
_PLANNER_ABOVE_ZERO = ("ttft_s", "itl_ms", "attainment", "interval_s", "switches_per_minute")
_ABOVE_ZERO = (
    "handoff.link_timeout_s",
    "router.request_timeout_s",
    "router.status_interval_s",
    *(f"router.classes.{name}.weight" for name in _CLASSES),
    *(f"planner.{name}" for name in _PLANNER_ABOVE_ZERO),
)
_AT_MOST: Mapping[str, float] = {
    "router.port": 65535,
    "router.replicas": ROUTERS_MAX,
    "router.http.port": 65535,
    "router.smg.port": 65535,
    "router.stop_grace_s": STOP_GRACE_S_MAX,
    "planner.attainment": PLANNER_ATTAINMENT_MAX,
    "planner.interval_s": PLANNER_INTERVAL_S_MAX,
    "planner.margin": 0.9,
    "planner.drain_s": DRAIN_S_MAX,
    "scheduler.output_reserve": 1,
    "tracing.requests_kept": REQUESTS_KEPT_MAX,
    "tracing.sample_ratio": 1,
    "speculation.ngram.max_draft": DRAFT_TOKENS_MAX,
}
_NOT_EMPTY = (
    *("model.path", "model.served_name", "worker_host"),
    *("router.host", "router.smg.host", "router.smg.tenant"),
    *("ray.address", "ray.namespace"),
)


_GROUP_OWN = {"CPU": "cpus", "GPU": "gpus"}
"""Resources of Ray that workers have settings for."""


def validate_config(config: ClusterConfig, values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` naming the first setting that is out of its range or goes with no other.

    `values` are the settings of `config` by their dotted names.
    """
    _validate_values(values)
    if config.cache.host.files.directory and config.cache.host.memory_bytes == 0:
        raise ConfigError("cache.host.files.directory", "needs cache.host.memory_bytes above 0")
    if config.cache.host.memory_bytes and not config.cache.radix:
        raise ConfigError("cache.host.memory_bytes", "needs cache.radix: a tier of an index")
    groups = config.workers
    _validate_quantization(config.model)
    _validate_device(config, values)
    for role in _ROLES:
        gpus = getattr(groups, role).gpus
        if gpus > 1 and not gpus.is_integer():
            # Ray shares one GPU among workers, but gives no worker a GPU and a part of another.
            raise ConfigError(f"workers.{role}.gpus", f"is {gpus}; above 1 it must be whole")
        _validate_ranks(f"workers.{role}", getattr(groups, role), config.cache.host)
        _validate_resources(f"workers.{role}", getattr(groups, role).resources, _GROUP_OWN)
        _validate_cores(f"workers.{role}", getattr(groups, role))
    if groups.decode.count + groups.both.count == 0:
        raise ConfigError("workers.decode.count", "no worker could decode; set this or both.count")
    if groups.prefill.count > 0 and groups.decode.count == 0:
        raise ConfigError("workers.decode.count", "prefill workers need a decode worker")
    _validate_adapters(config.model)
    _validate_ngram(config.speculation.ngram)
    _validate_resources("router", config.router.resources, {})
    _validate_ports(config.router)
    _validate_security(config.router.security)
    _validate_smg(config.router)
    _validate_planner(config)
    _validate_addresses(config)


def _validate_adapters(model: ModelConfig) -> None:
    setting = "model.adapters"
    if len(model.adapters) > ADAPTERS_MAX:
        raise ConfigError(setting, f"are {len(model.adapters)}; at most {ADAPTERS_MAX}")
    for name, directory in model.adapters.items():
        if not 0 < len(name) <= ADAPTER_NAME_CHARACTERS_MAX:
            problem = f"names must have 1 to {ADAPTER_NAME_CHARACTERS_MAX} characters"
            raise ConfigError(setting, problem)
        if not name.isprintable():
            raise ConfigError(setting, f"{name!r} has characters that cannot be printed")
        if name == model.served_name:
            raise ConfigError(f"{setting}.{name}", "has the name of the model, model.served_name")
        if not directory:
            raise ConfigError(f"{setting}.{name}", "must not be empty")


def _validate_ngram(ngram: NgramConfig) -> None:
    if ngram.match_max < ngram.match_min:
        problem = f"is {ngram.match_max}; must be at least match_min, {ngram.match_min}"
        raise ConfigError("speculation.ngram.match_max", problem)


def _validate_quantization(model: ModelConfig) -> None:
    """Refused is what there is no product for."""
    if model.quantization.value == "none":
        return
    for setting, value, needed in (
        ("model.device", model.device.value, "cpu"),
        ("model.dtype", model.dtype.value, "float32"),
    ):
        if value != needed:
            problem = f"is {model.quantization.value}; needs {setting} {needed}, which is {value}"
            raise ConfigError("model.quantization", problem)


def _validate_device(config: ClusterConfig, values: Mapping[str, Any]) -> None:
    """On a CUDA device everything that has no kernel, or no device, is refused before the start."""
    if config.model.device.value != "cuda":
        return
    dtype = config.model.dtype.value
    if dtype not in _CUDA_DTYPES:
        problem = f"is {dtype}; must be {' or '.join(_CUDA_DTYPES)} with model.device cuda"
        raise ConfigError("model.dtype", problem)
    if config.cache.dtype.value not in ("auto", dtype):
        problem = f"is {config.cache.dtype.value}; must be auto with model.device cuda"
        raise ConfigError("cache.dtype", problem)
    for role in _ROLES:
        group = f"workers.{role}"
        if values[f"{group}.count"] and not values[f"{group}.gpus"]:
            raise ConfigError(f"{group}.gpus", "is 0; must be above 0 with model.device cuda")
        if values[f"{group}.count"] and values[f"{group}.gpus"] < 1:
            _require_host_links(config, role)
        ranks = values[f"{group}.tensor_parallel"]
        if ranks > 1:
            problem = f"is {ranks}; must be 1 with model.device cuda"
            raise ConfigError(f"{group}.tensor_parallel", problem)


def _require_host_links(config: ClusterConfig, role: str) -> None:
    """NCCL refuses two ends on one device."""
    if role != "both" and config.handoff.transport.value != "gloo":
        problem = f"must be gloo: workers.{role} share a GPU, which has no link to itself"
        raise ConfigError("handoff.transport", problem)


def _validate_planner(config: ClusterConfig) -> None:
    """What could never be kept is refused before the start."""
    planner, groups = config.planner, config.workers
    if planner.mode.value == "off":
        return
    if not groups.prefill.count:
        problem = f"is {planner.mode.value}; needs workers.prefill.count above 0: roles to change"
        raise ConfigError("planner.mode", problem)
    if config.router.replicas > 1:
        # Each would see its own share of the requests, and undo what another one decides.
        problem = f"is {planner.mode.value}; needs router.replicas 1, which is"
        raise ConfigError("planner.mode", f"{problem} {config.router.replicas}")
    least = planner.prefill_min + planner.decode_min
    if groups.prefill.count + groups.decode.count < least:
        problem = f"and planner.decode_min are {least}, more workers than there are"
        raise ConfigError("planner.prefill_min", problem)
    if planner.workers_max and planner.workers_max < max(planner.workers_min, least):
        raise ConfigError("planner.workers_max", "is less than what there has to be at least")


def _validate_ports(router: RouterConfig) -> None:
    if router.http.port == 0 and router.port == _AT_MOST["router.port"]:
        raise ConfigError("router.http.port", "must be set: router.port is the last one")
    last = max(router.port, router.http.port, router.smg.port) + 2 * (router.replicas - 1)
    if last >= _AT_MOST["router.port"] and router.replicas > 1:
        problem = f"is {router.replicas}: one on the same node as the others would have port {last}"
        raise ConfigError("router.replicas", problem)
    if router.http.port == router.port != 0:
        raise ConfigError("router.http.port", f"is {router.port}, as router.port is")


def _validate_security(security: SecurityConfig) -> None:
    """Half of a protection is none, and must not look like one."""
    if security.tls_certificate and not security.tls_key:
        problem = "must be set with router.security.tls_certificate"
        raise ConfigError("router.security.tls_key", problem)
    for setting, value in (
        ("tls_key", security.tls_key),
        ("tls_client_ca", security.tls_client_ca),
    ):
        if value and not security.tls_certificate:
            problem = "needs router.security.tls_certificate"
            raise ConfigError(f"router.security.{setting}", problem)


def _validate_smg(router: RouterConfig) -> None:
    smg = router.smg
    taken = (router.port, router.http.port or router.port + 1)
    if smg.port and router.port and smg.port in taken:
        raise ConfigError("router.smg.port", f"is {smg.port}, which the router uses already")
    if smg.tenant == ADMIN_TENANT:
        raise ConfigError("router.smg.tenant", "must not be the operator: nobody shows a key there")
    if len(smg.tenant) > TENANT_CHARACTERS_MAX:
        problem = f"has more than {TENANT_CHARACTERS_MAX} characters"
        raise ConfigError("router.smg.tenant", problem)


def _validate_addresses(config: ClusterConfig) -> None:
    if is_wildcard(config.worker_host):
        problem = f"is {config.worker_host}, which nobody can call; auto is the node's address"
        raise ConfigError("worker_host", problem)
    host, _, port = config.ray.address.rpartition(":")
    if config.ray.address != AUTO and not (host and port.isdecimal() and "/" not in host):
        # Not ray://: Ray's own client ends with its connection, and actors with it.
        problem = f"is {config.ray.address!r}; must be host:port of a head, or {AUTO}"
        raise ConfigError("ray.address", problem)


def _validate_resources(name: str, resources: Mapping[str, float], own: Mapping[str, str]) -> None:
    """`own`: settings that stand for a resource; empty: the member has none of these."""
    for resource, amount in resources.items():
        if resource in own:
            raise ConfigError(f"{name}.resources.{resource}", f"is set by {name}.{own[resource]}")
        if resource in _GROUP_OWN:
            raise ConfigError(f"{name}.resources.{resource}", "is not for routers to reserve")
        if amount <= 0 or (amount > 1 and not amount.is_integer()):
            # Ray knows parts of one, and whole numbers.
            problem = f"is {amount:g}; must be above 0, and whole above 1"
            raise ConfigError(f"{name}.resources.{resource}", problem)


def _validate_ranks(name: str, group: WorkerGroupConfig, host: HostTierConfig) -> None:
    if group.tensor_parallel == 1:
        return
    if group.threads > 1:
        problem = f"is {group.threads}; must be 1 with {name}.tensor_parallel above 1"
        raise ConfigError(f"{name}.threads", problem)
    if host.memory_bytes > 0:
        # A page of a lower tier is a page of one pool.
        problem = f"must be 0 with {name}.tensor_parallel above 1"
        raise ConfigError("cache.host.memory_bytes", problem)


def _validate_cores(name: str, group: WorkerGroupConfig) -> None:
    try:
        cores = cores_in(group.cores)
    except ValueError as error:
        raise ConfigError(f"{name}.cores", str(error)) from error
    threads = group.threads * group.tensor_parallel
    if cores and len(cores) < threads:
        raise ConfigError(f"{name}.cores", f"are {len(cores)} for {threads} threads")


def _validate_values(values: Mapping[str, Any]) -> None:
    """What each setting allows by itself."""
    for name, low in _AT_LEAST.items():
        if values[name] < low:
            raise ConfigError(name, f"is {values[name]}; must be at least {low}")
    for name in _ABOVE_ZERO:
        if values[name] <= 0:
            raise ConfigError(name, f"is {values[name]}; must be above 0")
    for name, high in _AT_MOST.items():
        if values[name] > high:
            raise ConfigError(name, f"is {values[name]}; must be at most {high}")
    for name in _NOT_EMPTY:
        if not values[name]:
            raise ConfigError(name, "must not be empty")
