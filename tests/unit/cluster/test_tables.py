from __future__ import annotations

import pytest

from cluster.tables import accounts_table, format_bytes, format_table, workers_table
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
        *("decode-0", "9", "0", "0", "0", "0", "10", "0", "0/0"),
    ]
