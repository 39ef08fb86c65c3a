"""The configuration of a cluster: one tree of frozen dataclasses, parsed once.

Sources, later ones win: the defaults below, a YAML file, `KVFERRY_*` variables
(`KVFERRY_CACHE__PAGE_SIZE=64`), command-line flags (`--cache.page_size 64`). Unknown names are
refused with the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import yaml

from kvferry.addresses import AUTO
from kvferry.config_checks import validate_config
from kvferry.errors import ConfigError
from kvferry.planner_config import PlannerConfig
from kvferry.ray_config import PlacementConfig, RayConfig
from kvferry.router_config import RouterConfig
from kvferry.tracing_config import TracingConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

ENVIRONMENT_PREFIX = "KVFERRY_"
_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
BUNDLED_MODEL = "bundled:SmolLM2-135M-Instruct"


class DType(Enum):
    """Element type of weights."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Quantization(Enum):
    """How weights are held in memory, if not in their element type."""

    NONE = "none"
    INT8 = "int8"
    """Eight bits and a float32 scale per 32 neighbours; products are computed in float32."""


class DeviceKind(Enum):
    """Where a worker computes, and where its KV lies."""

    CPU = "cpu"
    CUDA = "cuda"


class KvDType(Enum):
    """Element type of KV. `AUTO` is the model's. int8 has a scale per token and head."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    FLOAT8_E4M3 = "float8_e4m3"
    FLOAT8_E5M2 = "float8_e5m2"


class KvArrangement(Enum):
    """Order of heads and tokens within a page."""

    NHD = "nhd"
    HND = "hnd"


class EvictionPolicy(Enum):
    """Which unlocked cache goes first. See `mem_cache.eviction`."""

    LRU = "lru"
    LFU = "lfu"
    FIFO = "fifo"
    FILO = "filo"
    MRU = "mru"
    PRIORITY = "priority"
    SLRU = "slru"


class WritePolicy(Enum):
    """When the KV of a cached page is copied to the host tier."""

    WRITE_THROUGH = "write_through"
    """As soon as it is published."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it was hit for the second time."""
    WRITE_BACK = "write_back"
    """When it is evicted from the device."""


class KvReturn(Enum):
    """Whether decode workers give the KV of answers back to where the prompt was computed."""

    NEVER = "never"
    AUTO = "auto"
    """Where fetching it is cheaper than computing it in the next turn."""
    ALWAYS = "always"
    """Wherever there is room for it."""


class TransportChoice(Enum):
    """How KV travels between workers. See `kv_transfer.links.choice`."""

    AUTO = "auto"
    """By shared memory between workers of one host, else over the network."""
    GLOO = "gloo"
    """Over the network always, through host memory."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model the cluster serves."""

    path: str = BUNDLED_MODEL
    """A local Hugging Face directory, a GGUF file, or the model that comes with the install."""
    served_name: str = "SmolLM2-135M-Instruct"
    """What clients call the model."""
    dtype: DType = DType.FLOAT32
    """Element type of the weights, and of what is computed with them."""
    quantization: Quantization = Quantization.NONE
    """How matrices are held in memory: int8 is quantized from the weights at the start, on CPUs
    with dtype float32 (docs/models.md). To the cache it is another model: it shares no KV."""
    device: DeviceKind = DeviceKind.CPU
    """cuda: with FlashInfer, on the GPU that Ray gives each worker (docs/gpu.md)."""
    context_length: int = 8192
    """Longest prompt + answer in tokens; bounded by what the model was made for."""
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters that clients may name in place of the model, such as `{sql: /adapters/sql}`:
    by name the directory with what peft saved."""


@dataclass(frozen=True, slots=True)
class WorkerGroupConfig:
    """Workers of one role."""

    count: int = 0
    """How many to keep running."""
    cpus: float = 1.0
    """What Ray reserves for each: a reservation, not a limit."""
    gpus: float = 0.0
    """What Ray reserves for each; whole above 1."""
    threads: int = 1
    """Compute threads per worker. More than its cores collapses (see docs/performance.md)."""
    tensor_parallel: int = 1
    """Ranks of each worker: each computes an equal part of the heads, on a thread of its own."""
    cores: str = ""
    """Cores on which the processes of these workers run, such as `0` or `0-3,8`; empty: all.
    Workers that share a machine do not disturb one another when each group has its own."""
    resources: dict[str, float] = field(default_factory=dict)
    """Further resources of Ray that each reserves, such as `{fast_net: 1}`: it runs where a node
    has them."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have, such as `{ray.io/accelerator-type: H100}`."""


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """How many workers of each role, and what each may use."""

    prefill: WorkerGroupConfig = WorkerGroupConfig(count=1)
    decode: WorkerGroupConfig = WorkerGroupConfig(count=1)
    both: WorkerGroupConfig = WorkerGroupConfig(count=0)
    """Aggregated workers: prefill and decode without a handoff."""


@dataclass(frozen=True, slots=True)
class FileTierConfig:
    """KV in files, below the host tier."""

    directory: str = ""
    """Where each worker has a folder of its own. Empty: no file tier."""
    bytes_max: int = 4 * 2**30
    """Per worker; the least recently used files go first."""


@dataclass(frozen=True, slots=True)
class HostTierConfig:
    """KV in host memory, below the device's pool."""

    memory_bytes: int = 0
    """Per worker. 0: no host tier."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    """When the KV of a cached page is copied to the host tier."""
    load_back_tokens_min: int = 64
    """Host hits shorter than this are recomputed: a copy is not worth waiting for."""
    files: FileTierConfig = field(default_factory=FileTierConfig)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV memory of each worker."""

    page_size: int = 16
    """Tokens per page; prefixes are shared in whole pages."""
    memory_bytes: int = 768 * 2**20
    """Budget for KV and the row table. 768 MiB is 17 k tokens of SmolLM2-135M in float32."""
    rows: int = 64
    """Sequences tracked at once, handoffs included."""
    radix: bool = True
    """False: nothing is shared between requests."""
    eviction: EvictionPolicy = EvictionPolicy.LRU
    """Which unlocked cache goes first."""
    dtype: KvDType = KvDType.AUTO
    """Element type of KV; auto is the model's."""
    arrangement: KvArrangement = KvArrangement.NHD
    """Order of heads and tokens within a page."""
    host: HostTierConfig = field(default_factory=HostTierConfig)
    audit: bool = False
    """Run every ledger check after every change. For tests."""
    audit_interval_steps: int = 0
    """Run every ledger check between two steps, each so many steps. 0: only when idle."""

    def with_files_in(self, folder: str) -> CacheConfig:
        """The same, with files in a folder below the configured directory, if there is one."""
        directory = self.host.files.directory
        if not directory:
            return self
        files = dataclasses.replace(self.host.files, directory=f"{directory}/{folder}")
        return dataclasses.replace(self, host=dataclasses.replace(self.host, files=files))


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one engine step may contain."""

    chunk_tokens: int = 128
    """Most prompt tokens computed in one step, over all requests. A step cannot be interrupted,
    so this also bounds how long a cancelled request keeps its KV: 128 tokens of a 135M model are
    about 0.45 s of one core, 0.7 s behind a long context."""
    itl_limit_ms: float = 0.0
    """How long a step may take while answers are running: what it computes of prompts is cut to
    that, by what steps have cost on this worker, though not below 16 tokens. 0: no limit but
    `chunk_tokens`."""
    running_max: int = 32
    """Most sequences decoded together."""
    queue_max: int = 256
    """Requests a worker accepts beyond `running_max` before it says it is overloaded."""
    output_reserve: float = 0.25
    """Share of `max_tokens` for which slots are set aside when a request is admitted. Answers
    mostly end early; where they do not, the youngest requests are retracted. 1: never retract."""


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """Guesses that are looked up in the sequence itself. See `engine.speculation`."""

    max_draft: int = 0
    """Most tokens guessed per sequence and step. 0: none. On a CPU 3 is best: up to four new tokens
    of a sequence are computed by the kernels that decode."""
    match_min: int = 2
    """Fewest last tokens that must have occurred before."""
    match_max: int = 4
    """Most last tokens that are looked for. The longest match is followed, of several the last."""
    step_cost_tokens: float = 6.0
    """What a step costs beside its tokens, in tokens. With so many sequences in a step a guess is
    computed if it is right in half of the cases, with fewer of them more readily."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Computing several tokens of an answer in one step. It changes no answer."""

    ngram: NgramConfig = field(default_factory=NgramConfig)


@dataclass(frozen=True, slots=True)
class HandoffConfig:
    """Moving KV between workers."""

    transport: TransportChoice = TransportChoice.AUTO
    """How it travels."""
    staging_buffer_bytes: int = 4 * 2**20
    """Largest chunk. 1-16 MiB is where Gloo is fast and what can hang stays small."""
    staging_buffers: int = 8
    """Buffers, hence chunks in flight, of one link in one direction."""
    checksums: bool = False
    """Check every payload by its CRC-32."""
    local_prefill_tokens_max: int = 0
    """A decode worker computes prompts with at most this many uncached tokens by itself."""
    link_timeout_s: float = 20.0
    """Longest wait for one chunk before the link is given up."""
    links_max: int = 64
    """Links to sinks that a worker keeps; one more closes the one that rested longest."""
    kv_return: KvReturn = KvReturn.NEVER
    """Whether the KV of an answer goes back to the worker that computed its prompt, so that the
    next turn does not compute it again."""
    trace_file: str = ""
    """Each worker appends every change of state of its handoffs to this file, with a point and
    its id behind the name. For diagnosis. Empty: no trace."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The whole configuration."""

    model: ModelConfig = field(default_factory=ModelConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    worker_host: str = AUTO
    """Address that workers bind and announce. auto: that of the Ray node each of them runs on,
    which is 127.0.0.1 under `kvferry serve`."""
    restart_backoff_s: float = 0.5
    """Wait before a dead worker is started again; doubles up to 30 s while it keeps dying."""


def load_config(
    file: Path | None, environment: Mapping[str, str], overrides: Mapping[str, str]
) -> ClusterConfig:
    """Compose the configuration of a process and validate it.

    `overrides` maps dotted names to text, as flags do. Raises `ConfigError` naming the setting,
    and the variable that sets it if one does.
    """
    values = _read_yaml(file) if file is not None else {}
    variables = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", "."): name
        for name in environment
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    try:
        for dotted, name in variables.items():
            _set_dotted(values, dotted, environment[name])
        for dotted, text in overrides.items():
            _set_dotted(values, dotted, text)
        config: ClusterConfig = _build(ClusterConfig, values, "")
        validate_config(config, dict(_leaves(config, "")))
    except ConfigError as error:
        # Whoever has forgotten a variable does not find it in the file or on the command line.
        setters = [
            name
            for dotted, name in variables.items()
            if f"{dotted}.".startswith(f"{error.field}.") and dotted not in overrides
        ]
        if not setters:
            raise
        problem = f"{error.problem} ({' and '.join(setters)} set{'s' * (len(setters) == 1)} it)"
        raise ConfigError(error.field, problem) from error
    return config


def config_from_mapping(values: Mapping[str, Any]) -> ClusterConfig:
    """The inverse of `to_mapping`, for a process that gets its configuration from another one."""
    config: ClusterConfig = _build(ClusterConfig, dict(values), "")
    validate_config(config, dict(_leaves(config, "")))
    return config


def settings(tree: type = ClusterConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, default) of every setting, for flags and documentation."""
    yield from _leaves(tree(), prefix)


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for entry in dataclasses.fields(node):
        value = getattr(node, entry.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}", value


def to_mapping(config: Any) -> dict[str, Any]:
    """The configuration as plain values that `load_config` reads back from YAML."""
    out: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value):
            out[entry.name] = to_mapping(value)
        else:
            out[entry.name] = value.value if isinstance(value, Enum) else value
    return out


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("config", f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("config", f"{file} is not UTF-8: {error}") from error
    values = _parse_yaml("config", text, str(file))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("config", f"{file} must contain a mapping")
    return values


def _parse_yaml(name: str, text: str, what: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: what looks like a date and is none. YAML's own messages have many lines.
        problem = " ".join(str(error).split())
        raise ConfigError(name, f"{what} is not valid YAML: {problem}") from error


def _set_dotted(values: dict[str, Any], dotted: str, text: str) -> None:
    *path, last = dotted.split(".")
    node = values
    for name in path:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(dotted, f"{name} is not a section")
        node = child
    node[last] = _parse_yaml(dotted, text, repr(text))


def _build(kind: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(prefix.rstrip(".") or "config", "must be a mapping")
    known = {entry.name for entry in dataclasses.fields(kind)}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise ConfigError(f"{prefix}{name}", f"is not a setting{hint}")
    hints = typing.get_type_hints(kind)
    defaults = kind()
    made: dict[str, Any] = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, dict):
            # A section given in part keeps this section's defaults, not those of its class.
            value = to_mapping(getattr(defaults, name)) | value
        made[name] = _convert(hints[name], value, f"{prefix}{name}")
    return kind(**made)


def _convert(kind: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast("type", kind), value, f"{name}.")
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = [member.value for member in kind]
        if isinstance(value, bool) and "on" in choices:
            value = "on" if value else "off"  # As YAML reads these two words.
        if value not in choices:
            raise ConfigError(name, f"is {value!r}; must be one of {', '.join(choices)}")
        return kind(value)
    if kind is float:
        return _to_float(value, name)
    if kind in (dict[str, str], dict[str, float]):
        return _to_entries(value, name, typing.get_args(kind)[1])
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # YAML reads a text of digits as a number.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(name, f"is {value!r}; must be {_KIND_NAMES[kind]}")
    return value


def _to_entries(value: Any, name: str, kind: type) -> dict[str, Any]:
    if not isinstance(value, dict):
        kinds = "texts" if kind is str else "numbers"
        raise ConfigError(name, f"is {value!r}; must be a mapping of {kinds}")
    return {
        _convert(str, key, name): _convert(kind, at, f"{name}.{key}") for key, at in value.items()
    }


def _to_float(value: Any, name: str) -> float:
    """Also from text: YAML reads `1e3`, without a point, as text."""
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number):
                return number
    except (ValueError, OverflowError):
        pass  # Refused below, like what is no number at all.
    raise ConfigError(name, f"is {value!r}; must be a finite number")
