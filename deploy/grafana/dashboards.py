"""The Grafana dashboard of a cluster, as data; writes `kvferry.json` beside this file.

    python deploy/grafana/dashboards.py

Change the panels here, never in the JSON; a test compares the two, and every expression with the
metrics of a running cluster. Several routers tell of the same workers: figures of workers are the
largest of what routers say, figures of requests are sums over routers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WIDTH = 8
_HEIGHT = 8
_COLUMNS = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel."""

    expr: str
    legend: str
    """With labels in double braces."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over time."""

    title: str
    unit: str
    """Of Grafana's units."""
    queries: tuple[Query, ...]
    text: str = ""
    """What it tells, beyond its title."""
    is_stacked: bool = False
    has_exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


def _quantiles(title: str, stem: str, text: str = "") -> Panel:
    queries = tuple(
        Query(
            f"histogram_quantile({share}, sum by (le) (rate(kvferry_{stem}_seconds_bucket"
            f"[{_RATE}])))",
            f"p{round(100 * share)}",
        )
        for share in (0.5, 0.9, 0.99)
    )
    return Panel(title, "s", queries, text, has_exemplars=True)


def _of_workers(title: str, metric: str, unit: str = "short", text: str = "") -> Panel:
    query = Query(f"max by (worker, role) (kvferry_{metric})", "{{worker}}")
    return Panel(title, unit, (query,), text)


def _rate_by(title: str, metric: str, label: str, unit: str = "reqps", text: str = "") -> Panel:
    query = Query(f"sum by ({label}) (rate(kvferry_{metric}[{_RATE}]))", f"{{{{{label}}}}}")
    return Panel(title, unit, (query,), text, is_stacked=True)


ROWS = (
    Row(
        "Service",
        (
            _rate_by("Requests by outcome", "requests_total", "outcome"),
            Panel(
                "Tokens",
                "short",
                (
                    Query(f"sum(rate(kvferry_prompt_tokens_total[{_RATE}]))", "prompt / s"),
                    Query(f"sum(rate(kvferry_generation_tokens_total[{_RATE}]))", "answer / s"),
                ),
            ),
            Panel(
                "Attempts made again",
                "reqps",
                (
                    Query(
                        f"sum by (reason) (rate(kvferry_request_retries_total[{_RATE}]))",
                        "before a token: {{reason}}",
                    ),
                    Query(
                        f"sum by (reason) (rate(kvferry_request_failovers_total[{_RATE}]))",
                        "amid an answer: {{reason}}",
                    ),
                ),
                "Clients see none of these; they see failed requests.",
            ),
        ),
    ),
    Row(
        "Latency",
        (
            _quantiles("Time to first token", "time_to_first_token"),
            _quantiles("Inter-token latency", "inter_token_latency"),
            _quantiles("Whole request", "e2e_request_latency"),
            _quantiles("Queue", "request_queue_time", "Waiting for a place at the router."),
            _quantiles("Prefill", "request_prefill_time"),
            _quantiles("Decode", "request_decode_time"),
        ),
    ),
    Row(
        "Admission",
        (
            Panel(
                "Requests at the router",
                "short",
                (
                    Query("sum(kvferry_router_requests_running)", "running"),
                    Query("sum(kvferry_router_requests_waiting)", "waiting"),
                    Query("sum(kvferry_router_places)", "places"),
                ),
            ),
            _rate_by("Refused by reason", "router_requests_refused_total", "reason"),
            Panel(
                "Waiting by class",
                "short",
                (
                    Query(
                        "sum by (service_class) (kvferry_router_requests_waiting)",
                        "{{service_class}}",
                    ),
                ),
            ),
        ),
    ),
    Row(
        "Workers",
        (
            _of_workers("Running", "num_requests_running"),
            _of_workers("Waiting", "num_requests_waiting"),
            _of_workers("Prompt tokens waiting", "num_tokens_waiting"),
            _of_workers("Prefill rate", "prefill_tokens_per_second", text="Tokens per second."),
            Panel(
                "Reachable by role",
                "short",
                (
                    Query(
                        "count by (role) (max by (worker, role) (kvferry_worker_reachable) == 1)",
                        "{{role}}",
                    ),
                ),
            ),
            _of_workers("Draining", "worker_draining"),
        ),
    ),
    Row(
        "KV",
        (
            _of_workers("KV in use", "kv_cache_usage_perc", "percentunit"),
            Panel(
                "Slots by account",
                "short",
                (
                    Query(
                        "sum by (account) (max by (worker, account) (kvferry_kv_slots))",
                        "{{account}}",
                    ),
                ),
                "Every slot of every worker is in exactly one account.",
                is_stacked=True,
            ),
            _of_workers("Slots pinned by handoffs", "kv_slots_pinned"),
            Panel(
                "Prefix hit rate",
                "percentunit",
                (
                    Query(
                        f"sum(rate(kvferry_prefix_cache_hits_total[{_RATE}]))"
                        f" / sum(rate(kvferry_prefix_cache_queries_total[{_RATE}]))",
                        "of prompt tokens",
                    ),
                ),
            ),
            _rate_by(
                "Hit tokens by tier",
                "cache_hit_tokens_total",
                "tier",
                "short",
                "device and host: not computed; decode: not moved.",
            ),
            _of_workers("Sequences tracked", "kv_rows"),
        ),
    ),
    Row(
        "Handoffs",
        (
            Panel(
                "Handoffs at sinks by outcome",
                "ops",
                (
                    Query(
                        "sum by (outcome) (max by (worker, outcome) "
                        f'(rate(kvferry_handoffs_total{{side="sink"}}[{_RATE}])))',
                        "{{outcome}}",
                    ),
                ),
                "busy: an offer that found no room, and is made again.",
            ),
            _of_workers("Open handoffs", "num_handoffs"),
            Panel(
                "KV moved",
                "Bps",
                (Query(f"sum(rate(kvferry_handoff_bytes_total[{_RATE}]))", "all workers"),),
            ),
            _of_workers("Link rate", "link_bytes_per_second", "Bps", "While links are busy."),
            _quantiles("Decoding waits for KV", "handoff_wait", "After the first token was known."),
        ),
    ),
    Row(
        "Prefix index of the routers",
        (
            Panel(
                "Blocks known",
                "short",
                (Query("max by (pool) (kvferry_index_blocks)", "{{pool}}"),),
            ),
            _rate_by("KV event batches", "index_batches_total", "outcome", "ops"),
            Panel(
                "Silence of workers",
                "s",
                (Query("max by (worker) (kvferry_index_silence_seconds)", "{{worker}}"),),
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        panels.append(_heading(row, len(panels) + 1, y))
        y += 1
        for number, panel in enumerate(row.panels):
            x = number * _WIDTH % _COLUMNS
            panels.append(_panel(panel, len(panels) + 1, x, y))
            if x + _WIDTH == _COLUMNS or number + 1 == len(row.panels):
                y += _HEIGHT
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}
    return {
        "uid": "kvferry",
        "title": "kvferry",
        "tags": ["kvferry", "llm"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _heading(row: Row, number: int, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place}


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.is_stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": x, "y": y},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "exemplar": panel.has_exemplars,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("kvferry.json").write_text(text(), encoding="utf-8")
