from __future__ import annotations

import json
import re
from pathlib import Path

from cluster.status_json import status_json
from kvferry.rpc.v1 import inference_pb2 as inference

MODEL = inference.ModelInfoResponse(
    model="small", dtype="float32", context_length=4096, page_size=16
)


def worker(**more):
    return inference.WorkerSummary(
        worker_id="decode-0", role="decode", incarnation=255, address="10.0.0.1:7", pid=9, **more
    )


def told(*workers):
    status = inference.ClusterStatusResponse(
        membership_version=3, requests_in_flight=2, workers=workers
    )
    line = status_json(MODEL, status)
    assert "\n" not in line
    return json.loads(line)


def test_what_is_known_of_a_worker_is_told():
    accounts = inference.KvAccounts(
        free=1, evictable=2, protected=3, private=4, inbound=5, total=15, rows_live=1, rows_total=8
    )
    load = inference.WorkerLoad(running=2, waiting=1, waiting_tokens=70, handoffs=1)
    index = inference.KvIndex(known_to=7)
    (found,) = told(
        worker(
            reachable=True,
            accounts=accounts,
            load=load,
            kv_index=index,
            indexed_blocks=12,
            counters={"b": 2, "a": 1},
        )
    )["workers"]
    assert found == {
        "name": "decode-0",
        "role": "decode",
        "state": "ok",
        "pid": 9,
        "incarnation": "00000000000000ff",
        "address": "10.0.0.1:7",
        "running": 2,
        "waiting": 1,
        "waiting_tokens": 70,
        "handoffs": 1,
        "prefill_tokens_per_s": None,
        "link_bytes_per_s": None,
        "kv_slots": {
            "free": 1,
            "evictable": 2,
            "protected": 3,
            "private": 4,
            "inbound": 5,
            "loading": 0,
            "total": 15,
        },
        "kv_slots_pinned": 0,
        "rows": {"live": 1, "total": 8},
        "host_kv_slots": None,
        "indexed_blocks": 12,
        "counters": {"a": 1, "b": 2},
    }


def test_what_is_unknown_is_null_and_not_zero():
    (lost,) = told(worker())["workers"]
    assert (lost["state"], lost["indexed_blocks"], lost["host_kv_slots"]) == (
        *("unreachable", None),
        None,
    )
    (leaving,) = told(worker(reachable=True, draining=True))["workers"]
    assert leaving["state"] == "draining"


def test_a_host_tier_and_measured_rates_are_told():
    host = inference.HostAccounts(free=6, total=6)
    load = inference.WorkerLoad(prefill_tokens_per_s=300.0, link_bytes_per_s=1e9)
    (found,) = told(worker(reachable=True, host_accounts=host, load=load))["workers"]
    assert (found["host_kv_slots"]["free"], found["host_kv_slots"]["total"]) == (6, 6)
    assert (found["prefill_tokens_per_s"], found["link_bytes_per_s"]) == (300.0, 1e9)


def test_every_field_is_in_the_documentation():
    text = (Path(__file__).parents[3] / "docs/operation.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    answer = told(worker())
    assert {*answer, *answer["workers"][0]} <= documented
