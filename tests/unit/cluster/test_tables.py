from __future__ import annotations

import pytest

from cluster.tables import (
    accounts_table,
    counters_table,
    format_bytes,
    format_table,
    host_accounts_table,
    workers_table,
)
from kvferry.rpc.v1 import inference_pb2 as inference


def test_columns_are_as_wide_as_their_widest_cell():
    assert format_table(["name", "n"], [["a", "1000"], ["longer", "1"]]).splitlines() == [
        "name       n",
        "------  ----",
        "a       1000",
        "longer     1",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (46080, "45 KiB"), (3 * 2**30, "3 GiB")],
)
def test_bytes_read_in_binary_units(count, text):
    assert format_bytes(count) == text


def test_status_tables_name_each_worker_and_its_accounts():
    worker = inference.WorkerSummary(
        worker_id="decode-0", role="decode", incarnation=255, reachable=False, pid=42
    )
    worker.accounts.free = 9
    worker.accounts.total = 10
    status = inference.ClusterStatusResponse(workers=[worker])
    assert "unreachable" in workers_table(status)
    assert "#00000000000000ff" in workers_table(status)
    assert accounts_table(status).splitlines()[-1].split() == [
        *("decode-0", "9", "0", "0", "0", "0", "0", "10", "0", "0/0"),
    ]


@pytest.mark.parametrize(
    ("worker", "cells"),
    [
        (inference.WorkerSummary(reachable=True), ["ok", "unknown"]),
        (
            inference.WorkerSummary(
                reachable=True, indexed_blocks=7, kv_index=inference.KvIndex(known_to=0)
            ),
            ["ok", "7"],
        ),
        (
            inference.WorkerSummary(
                reachable=True,
                draining=True,
                indexed_blocks=7,
                kv_index=inference.KvIndex(known_to=3, full=True),
            ),
            ["draining", "7 and more"],
        ),
    ],
)
def test_status_tells_whether_the_blocks_of_a_worker_are_known(worker, cells):
    worker.worker_id = "w"
    last = workers_table(inference.ClusterStatusResponse(workers=[worker])).splitlines()[-1]
    assert f"  {cells[0]}  " in last
    assert last.endswith(f"  {cells[1]}")


def test_only_workers_with_a_host_tier_are_in_its_table():
    one = inference.WorkerSummary(worker_id="decode-0")
    two = inference.WorkerSummary(worker_id="prefill-0")
    two.host_accounts.writing, two.host_accounts.total = 4, 64
    status = inference.ClusterStatusResponse(workers=[one, two])
    assert [line.split() for line in host_accounts_table(status).splitlines()[2:]] == [
        ["prefill-0", "0", "0", "0", "4", "0", "64"]
    ]


def test_counters_stand_beside_one_another():
    one = inference.WorkerSummary(worker_id="a", counters={"steps": 7})
    two = inference.WorkerSummary(worker_id="b", counters={"bytes": 1, "steps": 9})
    table = counters_table(inference.ClusterStatusResponse(workers=[one, two]))
    assert [line.split() for line in table.splitlines()] == [
        ["counter", "a", "b"],
        ["-------", "-", "-"],
        ["bytes", "0", "1"],
        ["steps", "7", "9"],
    ]
