"""The cluster as the router knows it, in the console's words. Asks no worker anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.limits import CONSOLE_WORKERS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.accounts import HostAccounts, KvAccounts, WorkerLoad
    from router.admission_snapshot import AdmissionSnapshot
    from router.api.console.shapes import (
        AccountsOut,
        AdmissionOut,
        ClusterOut,
        HostAccountsOut,
        LoadOut,
        RoleOut,
        WorkerOut,
    )
    from router.fleet import WorkerSummary
    from router.router import Router


def cluster_out(router: Router, now_s: float) -> ClusterOut:
    """Everything at this moment."""
    summaries = router.worker_summaries()
    shown = sorted(summaries, key=_urgency)[:CONSOLE_WORKERS_MAX]
    shown.sort(key=lambda each: each.info.worker_id)
    return {
        "now_s": now_s,
        "model": router.models.model,
        "membership_version": router.fleet.membership_version,
        "ready": router.is_ready,
        "in_flight": router.requests_in_flight,
        "admission": _admission_out(router.admission_snapshot()),
        "roles": roles_out(summaries),
        "workers": [worker_out(each) for each in shown],
        "workers_left_out": len(summaries) - len(shown),
    }


def worker_out(summary: WorkerSummary) -> WorkerOut:
    """One worker."""
    info, status = summary.info, summary.status
    return {
        "id": info.worker_id,
        "role": info.role.value,
        "incarnation": f"{info.incarnation:x}",
        "address": info.address,
        "pid": None if status is None else status.pid,
        "reachable": summary.is_reachable,
        "draining": info.is_draining,
        "indexed_blocks": summary.indexed_blocks,
        "events_known": summary.index.known_to is not None,
        "load": None if status is None else _load_out(status.load),
        "accounts": None if status is None else _accounts_out(status.accounts),
        "host_accounts": None if status is None else _host_accounts_out(status.host_accounts),
    }


def roles_out(summaries: Sequence[WorkerSummary]) -> dict[str, RoleOut]:
    """The sums of each role that has workers."""
    roles: dict[str, RoleOut] = {}
    for summary in summaries:
        role = roles.setdefault(summary.info.role.value, _no_workers())
        role["workers"] += 1
        role["reachable"] += summary.is_reachable
        status = summary.status
        # What one that is silent had at its last word is not counted.
        if status is not None and summary.is_reachable:
            role["running"] += status.load.running
            role["waiting"] += status.load.waiting
            role["slots_held"] += slots_held(status.accounts)
            role["slots_total"] += status.accounts.total
    return roles


def slots_held(accounts: KvAccounts) -> int:
    """Those that nobody else could have now."""
    return accounts.total - accounts.free - accounts.evictable


def _no_workers() -> RoleOut:
    return {
        "workers": 0,
        "reachable": 0,
        "running": 0,
        "waiting": 0,
        "slots_held": 0,
        "slots_total": 0,
    }


def _urgency(summary: WorkerSummary) -> tuple[bool, int, str]:
    """Sorts those first that an operator must not miss."""
    status = summary.status
    work = 0 if status is None else status.load.running + status.load.waiting
    is_well = summary.is_reachable and not summary.info.is_draining
    return is_well, -work, summary.info.worker_id


def _admission_out(admission: AdmissionSnapshot) -> AdmissionOut:
    return {
        "places": admission.places,
        "places_taken": admission.places_taken,
        "queues": {
            service_class.value: {
                "waiting": seen.waiting,
                "running": seen.running,
                "refused": sum(seen.refused.values()),
            }
            for service_class, seen in admission.classes.items()
        },
    }


def _load_out(load: WorkerLoad) -> LoadOut:
    return {
        "running": load.running,
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "handoffs": load.handoffs,
        "prefill_tokens_per_s": round(load.prefill_tokens_per_s, 1),
        "link_bytes_per_s": round(load.link_bytes_per_s),
    }


def _accounts_out(accounts: KvAccounts) -> AccountsOut:
    return {
        "free": accounts.free,
        "evictable": accounts.evictable,
        "protected": accounts.protected,
        "private": accounts.private,
        "inbound": accounts.inbound,
        "loading": accounts.loading,
        "total": accounts.total,
        "outbound_pinned": accounts.outbound_pinned,
        "rows_live": accounts.rows_live,
        "rows_total": accounts.rows_total,
    }


def _host_accounts_out(accounts: HostAccounts | None) -> HostAccountsOut | None:
    if accounts is None:
        return None
    return {
        "free": accounts.free,
        "evictable": accounts.evictable,
        "protected": accounts.protected,
        "writing": accounts.writing,
        "loading": accounts.loading,
        "total": accounts.total,
    }
