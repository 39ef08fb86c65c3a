from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvferry.config import (
    CacheConfig,
    ClusterConfig,
    DeviceKind,
    DType,
    config_from_mapping,
    load_config,
    settings,
    to_mapping,
)
from kvferry.errors import ConfigError

DEFAULT_FILE = Path(__file__).parents[3] / "kvferry.yaml"


def load(text: str, tmp_path: Path) -> ClusterConfig:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return load_config(file, {}, {})


def test_without_any_source_the_defaults_hold():
    assert load_config(None, {}, {}) == ClusterConfig()


def test_the_file_in_the_repository_states_every_default():
    assert yaml.safe_load(DEFAULT_FILE.read_text()) == to_mapping(ClusterConfig())


def test_flags_win_over_variables_and_these_over_the_file(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("cache: {page_size: 1, rows: 1, memory_bytes: 1}")
    config = load_config(
        file,
        {"KVFERRY_CACHE__PAGE_SIZE": "2", "KVFERRY_CACHE__ROWS": "2", "HOME": "/"},
        {"cache.page_size": "3"},
    )
    assert config.cache == CacheConfig(page_size=3, rows=2, memory_bytes=1)


def test_a_section_given_in_part_keeps_its_own_defaults(tmp_path):
    config = load("workers: {prefill: {threads: 2}}", tmp_path)
    assert (config.workers.prefill.count, config.workers.prefill.threads) == (1, 2)


def test_a_mapping_survives_the_way_through_another_process():
    config = load_config(None, {}, {"model.dtype": "bfloat16", "workers.both.count": "2"})
    assert config.model.dtype is DType.BFLOAT16
    assert config_from_mapping(to_mapping(config)) == config


def test_settings_names_each_leaf_with_its_default():
    named = dict(settings())
    assert named["cache.page_size"] == 16
    assert named["workers.decode.count"] == 1
    assert named["worker_host"] == "auto"


@pytest.mark.parametrize(
    ("text", "field", "hint"),
    [
        ("cache: {page_sise: 4}", "cache.page_sise", "did you mean cache.page_size?"),
        ("cach: {}", "cach", "did you mean cache?"),
        ("cache: 4", "cache", "must be a mapping"),
        ("[1, 2]", "config", "must contain a mapping"),
        ("cache: [", "config", "not valid YAML"),
        ("cache: {page_size: 0}", "cache.page_size", "at least 1"),
        ("router: {port: 7000, http: {port: 7000}}", "router.http.port", "as router.port is"),
        ("router: {port: 65535}", "router.http.port", "must be set"),
        ("cache: {page_size: true}", "cache.page_size", "must be a whole number"),
        ("cache: {page_size: 1.5}", "cache.page_size", "must be a whole number"),
        ("cache: {radix: 1}", "cache.radix", "must be true or false"),
        ("model: {dtype: float8}", "model.dtype", "must be one of float32, float16, bfloat16"),
        ("workers: {prefill: {count: -1}}", "workers.prefill.count", "at least 0"),
        ("workers: {both: {cpus: -0.5}}", "workers.both.cpus", "at least 0"),
        ("workers: {both: {gpus: -1}}", "workers.both.gpus", "at least 0"),
        ("workers: {both: {gpus: 1.5}}", "workers.both.gpus", "must be whole"),
        ("workers: {both: {resources: {CPU: 1}}}", "workers.both.resources.CPU", "both.cpus"),
        ("workers: {both: {resources: {a: 1.5}}}", "workers.both.resources.a", "whole above 1"),
        ("workers: {both: {resources: {a: b}}}", "workers.both.resources.a", "a finite number"),
        ("workers: {both: {resources: [a]}}", "workers.both.resources", "a mapping of numbers"),
        ("workers: {both: {labels: {a: [b]}}}", "workers.both.labels.a", "must be a text"),
        ("router: {replicas: 0}", "router.replicas", "at least 1"),
        ("router: {replicas: 65}", "router.replicas", "at most 64"),
        ("router: {replicas: 3, port: 65531}", "router.replicas", "would have port 65535"),
        ("worker_host: 0.0.0.0", "worker_host", "which nobody can call"),
        ("ray: {address: 'ray://a:1'}", "ray.address", "must be host:port of a head, or auto"),
        ("ray: {address: local}", "ray.address", "must be host:port of a head, or auto"),
        ("ray: {namespace: ''}", "ray.namespace", "must not be empty"),
        ("placement: {strategy: strict}", "placement.strategy", "spread, pack, pair"),
        ("model: {device: gpu}", "model.device", "must be one of cpu, cuda"),
        ("model: {adapters: [a]}", "model.adapters", "must be a mapping of texts"),
        ("model: {adapters: {a: [b]}}", "model.adapters.a", "must be a text"),
        ("model: {adapters: {a: ''}}", "model.adapters.a", "must not be empty"),
        ("model: {adapters: {'': b}}", "model.adapters", "1 to 128 characters"),
        (r'model: {adapters: {"a\nb": c}}', "model.adapters", "cannot be printed"),
        (r'model: {adapters: {"\ud800": c}}', "model.adapters", "cannot be printed"),
        ("model: {served_name: a, adapters: {a: b}}", "model.adapters.a", "the name of the model"),
        (
            f"model: {{adapters: {{{', '.join(f'a{n}: b' for n in range(65))}}}}}",
            "model.adapters",
            "are 65; at most 64",
        ),
        ("model: {quantization: int4}", "model.quantization", "must be one of none, int8"),
        (
            "model: {quantization: int8, dtype: bfloat16}",
            "model.quantization",
            "needs model.dtype float32, which is bfloat16",
        ),
        (
            "model: {quantization: int8, device: cuda, dtype: float16}",
            "model.quantization",
            "needs model.device cpu, which is cuda",
        ),
        ("model: {device: cuda}", "model.dtype", "is float32; must be float16 or bfloat16"),
        (
            "{model: {device: cuda, dtype: float16}, cache: {dtype: int8}}",
            "cache.dtype",
            "is int8; must be auto with model.device cuda",
        ),
        (
            "{model: {device: cuda, dtype: float16}, workers: {prefill: {gpus: 1}}}",
            "workers.decode.gpus",
            "is 0; must be above 0 with model.device cuda",
        ),
        (
            "{model: {device: cuda, dtype: bfloat16}, workers: {prefill: {gpus: 1},"
            " decode: {gpus: 2, tensor_parallel: 2}}}",
            "workers.decode.tensor_parallel",
            "is 2; must be 1 with model.device cuda",
        ),
        ("handoff: {link_timeout_s: 0}", "handoff.link_timeout_s", "above 0"),
        ("handoff: {link_timeout_s: -1.5}", "handoff.link_timeout_s", "above 0"),
        ("handoff: {local_prefill_tokens_max: -1}", "handoff.local_prefill_tokens_max", "least 0"),
        ("handoff: {staging_buffers: 0}", "handoff.staging_buffers", "at least 1"),
        ("router: {port: 65536}", "router.port", "at most 65535"),
        ("router: {port: -1}", "router.port", "at least 0"),
        ("router: {host: ''}", "router.host", "must not be empty"),
        ("router: {status_interval_s: 0}", "router.status_interval_s", "above 0"),
        ("router: {stop_grace_s: -1}", "router.stop_grace_s", "at least 0"),
        ("router: {stop_grace_s: 3601}", "router.stop_grace_s", "at most 3600"),
        ("router: {request_timeout_s: .nan}", "router.request_timeout_s", "finite number"),
        ("router: {request_timeout_s: .inf}", "router.request_timeout_s", "finite number"),
        ("router: {request_timeout_s: -1}", "router.request_timeout_s", "above 0"),
        ("router: {request_timeout_s: soon}", "router.request_timeout_s", "finite number"),
        ("router: {request_timeout_s: true}", "router.request_timeout_s", "finite number"),
        (f"router: {{request_timeout_s: 1{'0' * 400}}}", "router.request_timeout_s", "finite"),
        ("planner: {mode: maybe}", "planner.mode", "one of off, dry_run, on"),
        ("planner: {attainment: 1}", "planner.attainment", "at most 0.999"),
        ("{planner: {mode: on}, router: {replicas: 2}}", "planner.mode", "needs router.replicas 1"),
        ("planner: {mode: dry_run, decode_min: 2}", "planner.prefill_min", "are 3, more workers"),
        ("planner: {mode: on, workers_max: 1}", "planner.workers_max", "is less than"),
        ("restart_backoff_s: -0.1", "restart_backoff_s", "at least 0"),
        ("cache: 2026-99-99", "config", "not valid YAML"),
        ("workers: {decode: {threads: 0}}", "workers.decode.threads", "at least 1"),
        ("workers: {decode: {cores: 0-}}", "workers.decode.cores", "neither a core nor a range"),
        ("workers: {both: {cores: 3-1}}", "workers.both.cores", "runs backwards"),
        ("workers: {both: {cores: 3, threads: 2}}", "workers.both.cores", "are 1 for 2 threads"),
        ("workers: {both: {cores: true}}", "workers.both.cores", "must be a text"),
        (
            "workers: {both: {cores: 3, tensor_parallel: 2}}",
            "workers.both.cores",
            "are 1 for 2 threads",
        ),
        (
            "workers: {decode: {tensor_parallel: 0}}",
            "workers.decode.tensor_parallel",
            "at least 1",
        ),
        (
            "workers: {decode: {tensor_parallel: 2, threads: 2}}",
            "workers.decode.threads",
            "is 2; must be 1 with workers.decode.tensor_parallel above 1",
        ),
        (
            "{workers: {prefill: {tensor_parallel: 2}}, cache: {host: {memory_bytes: 1}}}",
            "cache.host.memory_bytes",
            "must be 0 with workers.prefill.tensor_parallel above 1",
        ),
        ("workers: {decode: {count: 0}}", "workers.decode.count", "no worker could decode"),
        (
            "workers: {decode: {count: 0}, both: {count: 1}}",
            "workers.decode.count",
            "prefill workers need a decode worker",
        ),
    ],
)
def test_what_cannot_be_used_is_named(text, field, hint, tmp_path):
    with pytest.raises(ConfigError) as refused:
        load(text, tmp_path)
    assert refused.value.field == field
    assert hint in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere"):
        load_config(tmp_path / "nowhere.yaml", {}, {})


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_bytes(b"worker_host: \xff\n")
    with pytest.raises(ConfigError, match="is not UTF-8") as refused:
        load_config(file, {}, {})
    assert refused.value.field == "config"


@pytest.mark.parametrize("text", ["[", "2026-99-99", "a: b: c"])
def test_a_flag_that_is_no_yaml_is_named_in_one_line(text):
    with pytest.raises(ConfigError, match="not valid YAML") as refused:
        load_config(None, {}, {"model.path": text})
    assert refused.value.field == "model.path"
    assert len(str(refused.value).splitlines()) == 1


def test_a_text_of_digits_is_a_text():
    assert load_config(None, {}, {"workers.both.cores": "1"}).workers.both.cores == "1"


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000.0), ("2.5E+1", 25.0), ("7", 7.0)])
def test_a_number_is_whatever_reads_as_one(text, value):
    config = load_config(None, {}, {"router.request_timeout_s": text})
    assert config.router.request_timeout_s == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("KVFERRY_CACHE__ROWS", "none", "cache.rows: is 'none'; must be a whole number"),
        ("KVFERRY_CACHE__ROWS", "0", "cache.rows: is 0; must be at least 1"),
        ("KVFERRY_CACHE__ROSW", "4", "cache.rosw: is not a setting; did you mean cache.rows?"),
        ("KVFERRY_CACHE", "4", "cache: must be a mapping"),
        ("KVFERRY_CACHE__ROWS__MAX", "4", "cache.rows: is {'max': 4}; must be a whole number"),
        ("KVFERRY_CACHE__ROWS", "[", "cache.rows: '[' is not valid YAML"),
    ],
)
def test_a_wrong_variable_is_named(name, text, expected):
    with pytest.raises(ConfigError) as refused:
        load_config(None, {name: text}, {})
    assert str(refused.value).startswith(expected)
    assert str(refused.value).endswith(f" ({name} sets it)")


def test_a_variable_that_a_flag_overrides_is_not_blamed():
    with pytest.raises(ConfigError, match=r"^cache.rows: is 0; must be at least 1$"):
        load_config(None, {"KVFERRY_CACHE__ROWS": "4"}, {"cache.rows": "0"})


@pytest.mark.parametrize(
    ("setting", "text", "problem"),
    [
        ("max_draft", "-1", "is -1; must be at least 0"),
        ("max_draft", "9", "is 9; must be at most 8"),
        ("max_draft", "two", "is 'two'; must be a whole number"),
        ("match_min", "0", "is 0; must be at least 1"),
        ("match_max", "1", "is 1; must be at least match_min, 2"),
        ("step_cost_tokens", "-1", "is -1.0; must be at least 0"),
        ("step_cost_tokens", ".nan", "is nan"),
        ("max_drafts", "1", "is not a setting; did you mean speculation.ngram.max_draft?"),
    ],
)
def test_what_is_wrong_about_speculation_is_named(setting, text, problem):
    with pytest.raises(ConfigError) as refused:
        load_config(None, {}, {f"speculation.ngram.{setting}": text})
    assert str(refused.value).startswith(f"speculation.ngram.{setting}: {problem}")


def test_each_worker_has_a_folder_of_its_own_for_files():
    cache = load_config(
        None, {}, {"cache.host.memory_bytes": "1", "cache.host.files.directory": "/kv"}
    ).cache
    assert cache.with_files_in("decode-0").host.files.directory == "/kv/decode-0"
    assert CacheConfig().with_files_in("decode-0") == CacheConfig(), "without files there is none"


def test_a_cuda_device_with_gpus_for_every_worker() -> None:
    settings = {"model.device": "cuda", "model.dtype": "bfloat16", "cache.dtype": "bfloat16"}
    gpus = {f"workers.{role}.gpus": "0.5" for role in ("prefill", "decode")}
    with pytest.raises(ConfigError, match=r"must be gloo: workers\.prefill share a GPU"):
        load_config(None, {}, settings | gpus)
    config = load_config(None, {}, settings | gpus | {"handoff.transport": "gloo"})
    assert config.model.device is DeviceKind.CUDA
    assert load_config(None, {}, {}).model.device is DeviceKind.CPU
