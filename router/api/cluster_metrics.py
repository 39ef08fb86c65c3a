"""What the router knows of itself and its workers, read when somebody asks for `/metrics`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import Metric

    from kvferry.accounts import HostAccounts, KvAccounts
    from router.fleet import WorkerSummary
    from router.router import Router

_NOT_ACCOUNTS = frozenset(("total", "rows_live", "rows_total", "outbound_pinned"))
_LABELS = ("worker", "role")
_HANDOFF_OUTCOMES = {
    "source": ("started", "closed", "aborted", "refused"),
    "sink": ("started", "adopted", "aborted", "busy"),
}
"""By side what a worker counts, as `<side>_<outcome>`."""


class ClusterMetrics(Collector):
    """A collector of one router's registry."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: names do not clash with those of `RequestMetrics`."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Every figure at this moment."""
        workers = self._router.worker_summaries()
        yield from self._of_router()
        yield from _of_workers(workers)
        yield from _of_kv(workers)
        yield _handoffs(workers)
        yield _counters(workers)

    def _of_router(self) -> Iterable[Metric]:
        router, admission = self._router, self._router.admission_snapshot()
        yield _gauge("router_ready", "Whether a request could be served", router.is_ready)
        version = router.fleet.membership_version
        yield _gauge("membership_version", "Rises whenever a worker comes or goes", version)
        yield _gauge(
            "router_requests_in_flight", "Accepted and not ended", router.requests_in_flight
        )
        yield _gauge("router_places", "Sequences that may run at once", admission.places)
        yield _gauge("router_places_taken", "Sequences that run", admission.places_taken)
        waiting = GaugeMetricFamily(
            "kvferry_router_requests_waiting", "Waiting for a place", labels=["service_class"]
        )
        running = GaugeMetricFamily(
            "kvferry_router_requests_running", "Having a place", labels=["service_class"]
        )
        refused = CounterMetricFamily(
            "kvferry_router_requests_refused",
            "Refused because of load or limits",
            labels=["service_class", "reason"],
        )
        for service_class, seen in admission.classes.items():
            name = service_class.value
            waiting.add_metric([name], seen.waiting)
            running.add_metric([name], seen.running)
            for reason, count in seen.refused.items():
                refused.add_metric([name, reason.value], count)
        yield from (waiting, running, refused)


def _of_workers(workers: Sequence[WorkerSummary]) -> Iterable[Metric]:
    labels = _LABELS
    reachable = GaugeMetricFamily("kvferry_worker_reachable", "Answers status calls", labels=labels)
    running = GaugeMetricFamily("kvferry_num_requests_running", "In the batch", labels=labels)
    waiting = GaugeMetricFamily("kvferry_num_requests_waiting", "Not in the batch", labels=labels)
    tokens = GaugeMetricFamily(
        "kvferry_num_tokens_waiting", "Prompt tokens accepted and not computed", labels=labels
    )
    handoffs = GaugeMetricFamily("kvferry_num_handoffs", "Not closed", labels=labels)
    prefill_rate = GaugeMetricFamily(
        "kvferry_prefill_tokens_per_second", "Measured while computing prompts", labels=labels
    )
    link_rate = GaugeMetricFamily(
        "kvferry_link_bytes_per_second", "Measured on busy links into the worker", labels=labels
    )
    draining = GaugeMetricFamily("kvferry_worker_draining", "Given nothing new", labels=labels)
    indexed = GaugeMetricFamily(
        "kvferry_indexed_blocks", "Blocks that the router knows the worker to hold", labels=labels
    )
    for worker in workers:
        name = _labels_of(worker)
        draining.add_metric(name, worker.info.is_draining)
        reachable.add_metric(name, worker.is_reachable)
        indexed.add_metric(name, worker.indexed_blocks)
        if worker.status is not None:
            load = worker.status.load
            running.add_metric(name, load.running)
            waiting.add_metric(name, load.waiting)
            tokens.add_metric(name, load.waiting_tokens)
            handoffs.add_metric(name, load.handoffs)
            prefill_rate.add_metric(name, load.prefill_tokens_per_s)
            link_rate.add_metric(name, load.link_bytes_per_s)
    yield from (reachable, draining, running, waiting, tokens, handoffs, indexed)
    yield from (prefill_rate, link_rate)


def _of_kv(workers: Sequence[WorkerSummary]) -> Iterable[Metric]:
    usage = GaugeMetricFamily(
        "kvferry_kv_cache_usage_perc",
        "Share of the KV slots that is neither free nor evictable, 0 to 1",
        labels=_LABELS,
    )
    by_account = (*_LABELS, "account")
    slots = GaugeMetricFamily(
        "kvferry_kv_slots", "Slots by owner; one holds one token", labels=by_account
    )
    host_slots = GaugeMetricFamily(
        "kvferry_host_kv_slots", "Slots of the host tier by owner", labels=by_account
    )
    capacity = GaugeMetricFamily(
        "kvferry_kv_slot_capacity", "What the accounts have to add up to", labels=_LABELS
    )
    pinned = GaugeMetricFamily(
        "kvferry_kv_slots_pinned", "Read by open handoffs; of any account", labels=_LABELS
    )
    rows = GaugeMetricFamily("kvferry_kv_rows", "Sequences tracked", labels=_LABELS)
    for worker in workers:
        if worker.status is None:
            continue
        name, accounts = _labels_of(worker), worker.status.accounts
        if accounts.total:
            held = accounts.total - accounts.free - accounts.evictable
            usage.add_metric(name, held / accounts.total)
        capacity.add_metric(name, accounts.total)
        pinned.add_metric(name, accounts.outbound_pinned)
        rows.add_metric(name, accounts.rows_live)
        _add_accounts(slots, name, accounts)
        if worker.status.host_accounts is not None:
            _add_accounts(host_slots, name, worker.status.host_accounts)
    yield from (usage, slots, host_slots, capacity, pinned, rows)


def _add_accounts(
    family: GaugeMetricFamily, labels: list[str], accounts: KvAccounts | HostAccounts
) -> None:
    for account, count in asdict(accounts).items():
        if account not in _NOT_ACCOUNTS:
            family.add_metric([*labels, account], count)


def _handoffs(workers: Sequence[WorkerSummary]) -> Metric:
    family = CounterMetricFamily(
        "kvferry_handoffs",
        "Handoffs by side and what became of them, since the worker started",
        labels=[*_LABELS, "side", "outcome"],
    )
    for worker in workers:
        if worker.status is None:
            continue
        for side, outcomes in _HANDOFF_OUTCOMES.items():
            for outcome in outcomes:
                count = worker.status.counters.get(f"{side}_{outcome}", 0)
                family.add_metric([*_labels_of(worker), side, outcome], count)
    return family


def _counters(workers: Sequence[WorkerSummary]) -> Metric:
    family = CounterMetricFamily(
        "kvferry_worker_events",
        "What a worker counted since it started",
        labels=[*_LABELS, "event"],
    )
    for worker in workers:
        if worker.status is not None:
            for event, count in worker.status.counters.items():
                family.add_metric([*_labels_of(worker), event], count)
    return family


def _labels_of(worker: WorkerSummary) -> list[str]:
    return [worker.info.worker_id, worker.info.role.value]


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvferry_{name}", text, value=value)
