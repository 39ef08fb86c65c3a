"""What `kvferry status --json` prints: docs/operation.md has its fields, which stay as they are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.rpc.v1 import inference_pb2 as inference

FORM = 1
"""Goes up when a field is taken away or means something else, not when one is added."""
KV_OWNERS = ("free", "evictable", "protected", "private", "inbound", "loading", "total")
HOST_KV_OWNERS = ("free", "evictable", "protected", "writing", "loading", "total")


def status_json(model: inference.ModelInfoResponse, status: inference.ClusterStatusResponse) -> str:
    """One line."""
    return json.dumps(
        {
            "kvferry_status": FORM,
            "model": {
                "name": model.model,
                "dtype": model.dtype,
                "context_length": model.context_length,
                "page_size": model.page_size,
            },
            "membership_version": status.membership_version,
            "requests_in_flight": status.requests_in_flight,
            "workers": [_worker(each) for each in status.workers],
        }
    )


def state_of(worker: inference.WorkerSummary) -> str:
    """ok, draining or unreachable."""
    if not worker.reachable:
        return "unreachable"
    return "draining" if worker.draining else "ok"


def _worker(worker: inference.WorkerSummary) -> dict[str, object]:
    load, kv = worker.load, worker.accounts
    has_host = worker.HasField("host_accounts")
    host = {name: getattr(worker.host_accounts, name) for name in HOST_KV_OWNERS}
    return {
        "name": worker.worker_id,
        "role": worker.role,
        "state": state_of(worker),
        "pid": worker.pid,
        "incarnation": f"{worker.incarnation:016x}",
        "address": worker.address,
        "running": load.running,
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "handoffs": load.handoffs,
        "prefill_tokens_per_s": load.prefill_tokens_per_s or None,
        "link_bytes_per_s": load.link_bytes_per_s or None,
        "kv_slots": {name: getattr(kv, name) for name in KV_OWNERS},
        "kv_slots_pinned": kv.outbound_pinned,
        "rows": {"live": kv.rows_live, "total": kv.rows_total},
        "host_kv_slots": host if has_host else None,
        "indexed_blocks": worker.indexed_blocks if worker.kv_index.HasField("known_to") else None,
        "counters": dict(sorted(worker.counters.items())),
    }
