"""`/metrics` of a running cluster, and everything that asks for it: dashboards, alerts, docs."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from kvferry.config import SchedulerConfig
from kvferry.membership import Membership, Role
from kvferry.rpc.v1 import inference_pb2 as inference
from router.api.http_server import serve_http
from tests.support.cutting_client import Cuts
from tests.support.digest_cluster import digest_cluster, digest_config
from tests.support.promql import selectors

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
DASHBOARD = ROOT / "deploy/grafana/kvferry.json"
DOCS = ROOT / "docs/observability.md"
OF_PROMETHEUS = {"up"}
"""Made by whoever scrapes."""
TARGET_LABELS = {"instance", "job"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Arena:
    """A cluster that has had a little of everything, and its HTTP door."""

    def __init__(self, cluster: Any, cuts: Cuts, url: str) -> None:
        self.cluster = cluster
        self.cuts = cuts
        self.url = url

    def ask(self, name: str, *cuts: int) -> None:
        self.cuts.after.extend(cuts)
        request = inference.GenerateRequest(
            request_id=name,
            token_ids=inference.TokenIds(ids=list(range(20, 61))),
            sampling=inference.SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0),
        )
        list(self.cluster.stub.Generate(request, timeout=60))

    def scrape(self, accept: str = "text/plain") -> str:
        with urlopen(Request(self.url, headers={"Accept": accept}), timeout=60) as answer:
            return answer.read().decode()

    def samples(self) -> list[tuple[str, dict[str, str]]]:
        families = prometheus(self.scrape())
        return [(sample.name, sample.labels) for each in families for sample in each.samples]


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    cuts = Cuts()
    config = digest_config(8, 512, scheduler=SchedulerConfig(chunk_tokens=16))
    roles = [Role.PREFILL, Role.DECODE, Role.DECODE]
    with digest_cluster(config, roles, cuts.connect) as cluster:
        door, port = cluster._run(serve_http(cluster.doors, ("127.0.0.1", 0)))
        made = Arena(cluster, cuts, f"http://127.0.0.1:{port}/metrics")
        made.ask("whole")
        made.ask("retried", 0)
        made.ask("failed-over", 3)
        yield made
        cluster._run(door.stop())


def _expressions() -> list[tuple[str, str]]:
    rules = [
        (rule["alert"], rule["expr"])
        for group in yaml.safe_load(ALERTS.read_text())["groups"]
        for rule in group["rules"]
    ]
    panels = [
        (panel["title"], target["expr"].replace("$__rate_interval", "5m"))
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", ())
    ]
    return rules + panels


def test_every_panel_and_alert_refers_to_metrics_that_exist(arena: Arena) -> None:
    samples = arena.samples()
    checked = 0
    for title, expr in _expressions():
        for selector in selectors(expr):
            if selector.name in OF_PROMETHEUS:
                continue
            taken = [labels for name, labels in samples if selector.takes(name, labels)]
            assert taken, f"{title}: nothing is {selector}"
            missing = set(selector.groups) - TARGET_LABELS - taken[0].keys()
            assert not missing, f"{title}: {selector.name} has no label {missing}"
            checked += 1
    assert checked > 60


def test_legends_show_labels_that_are_left() -> None:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            expr = target["expr"].replace("$__rate_interval", "5m")
            assert shown <= set(selectors(expr)[0].groups), panel["title"]


def test_a_metric_that_nobody_exposes_would_be_noticed(arena: Arena) -> None:
    samples = arena.samples()
    for expr in ("kvferry_nothing", 'kvferry_handoffs_total{side="middle"}'):
        (selector,) = selectors(expr)
        assert not any(selector.takes(*sample) for sample in samples)


def test_the_dashboard_is_what_its_generator_makes() -> None:
    path = ROOT / "deploy/grafana/dashboards.py"
    spec = importlib.util.spec_from_file_location("dashboards", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboards"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    assert DASHBOARD.read_text() == module.text(), "run python deploy/grafana/dashboards.py"


def test_every_alert_has_its_paragraph_and_what_to_say() -> None:
    headings = {
        line.removeprefix("### ").strip()
        for line in DOCS.read_text().splitlines()
        if line.startswith("### ")
    }
    names = []
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            names.append(rule["alert"])
            assert rule["alert"] in headings
            anchor = f"docs/observability.md#{rule['alert'].lower()}"
            assert rule["annotations"]["runbook"] == anchor
            assert rule["annotations"]["summary"]
            assert rule["labels"]["severity"] in ("critical", "warning")
    assert len(names) == len(set(names)) >= 15


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_rules_and_configuration() -> None:
    for what, file in (("rules", "alerts.yaml"), ("config", "prometheus.yaml")):
        command = ["promtool", "check", what, file]
        done = subprocess.run(command, cwd=ALERTS.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_docs_have_every_metric_with_its_labels(arena: Arena) -> None:
    row = r"^\| `(kvferry_\w+)` \| (.*?) \| (.*?) \| (.*?) \|$"
    rows = {name: rest for name, *rest in re.findall(row, DOCS.read_text(), re.MULTILINE)}
    families = {family.name: family for family in openmetrics(arena.scrape(OPENMETRICS))}
    assert rows.keys() == families.keys()
    for name, (labels, kind, text) in rows.items():
        family = families[name]
        assert (kind, text) == (family.type, family.documentation), name
        named = {label for sample in family.samples for label in sample.labels} - {"le"}
        # Of a host tier, or of failures, there is nothing in this cluster.
        assert not family.samples or set(re.findall(r"`(\w+)`", labels)) == named, name


def test_buckets_name_a_request_of_theirs_to_whoever_asks(arena: Arena) -> None:
    known = {record.trace.trace_id for record in arena.cluster.router.log.recent(100)}
    named: dict[str, set[str]] = {}
    for family in openmetrics(arena.scrape(OPENMETRICS)):
        for sample in family.samples:
            if sample.exemplar is not None:
                named.setdefault(family.name, set()).add(sample.exemplar.labels["trace_id"])
    assert named.keys() == {
        "kvferry_time_to_first_token_seconds",
        "kvferry_e2e_request_latency_seconds",
        "kvferry_request_queue_time_seconds",
        "kvferry_request_prefill_time_seconds",
        "kvferry_request_decode_time_seconds",
        "kvferry_handoff_wait_seconds",
    }
    assert all(traces <= known for traces in named.values())
    assert "trace_id" not in arena.scrape()


def test_figures_are_those_of_the_load(arena: Arena) -> None:
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in prometheus(arena.scrape())
        for sample in family.samples
    }
    assert values["kvferry_requests_total", "succeeded"] == 3
    assert values["kvferry_requests_total", "failed"] == 0
    assert values["kvferry_request_retries_total", "unavailable"] == 1
    assert values["kvferry_request_failovers_total", "unavailable"] == 1
    assert values["kvferry_e2e_request_latency_seconds_count",] == 3
    assert values["kvferry_time_to_first_token_seconds_count",] == 3
    assert values["kvferry_request_prefill_time_seconds_count",] == 3
    assert values["kvferry_request_queue_time_seconds_count", "standard"] == 3
    assert values["kvferry_generation_tokens_total",] == 24


def test_a_worker_that_left_has_no_series(arena: Arena) -> None:
    router, infos = arena.cluster.router, arena.cluster.infos
    left = infos[-1].worker_id

    def set_members(version: int, members: tuple[Any, ...]) -> None:
        arena.cluster._run(router.set_membership(Membership(version, members)))

    def has_series() -> bool:
        return any(labels.get("worker") == left for _, labels in arena.samples())

    assert has_series()
    set_members(2, tuple(infos[:-1]))
    assert not has_series()
    set_members(3, tuple(infos))
    assert has_series()
