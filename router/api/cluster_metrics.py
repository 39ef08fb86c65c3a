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
        yield _counters(workers)

    def _of_router(self) -> Iterable[Metric]:
        router, admission = self._router, self._router.admission_snapshot()
        yield _gauge("router_ready", "Whether a request could be served", router.is_ready)
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
        queue_time = CounterMetricFamily(
            "kvferry_request_queue_time_seconds",
            "Waited for a place, all requests together",
            labels=["service_class"],
        )
        for service_class, seen in admission.classes.items():
            name = service_class.value
            waiting.add_metric([name], seen.waiting)
            running.add_metric([name], seen.running)
            queue_time.add_metric([name], seen.wait_s_total)
            for reason, count in seen.refused.items():
                refused.add_metric([name, reason.value], count)
        yield from (waiting, running, refused, queue_time)


def _of_workers(workers: Sequence[WorkerSummary]) -> Iterable[Metric]:
    labels = ["worker", "role"]
    reachable = GaugeMetricFamily("kvferry_worker_reachable", "Answers status calls", labels=labels)
    running = GaugeMetricFamily("kvferry_num_requests_running", "In the batch", labels=labels)
    waiting = GaugeMetricFamily("kvferry_num_requests_waiting", "Not in the batch", labels=labels)
    tokens = GaugeMetricFamily(
        "kvferry_num_tokens_waiting", "Prompt tokens accepted and not computed", labels=labels
    )
    handoffs = GaugeMetricFamily("kvferry_num_handoffs", "Not closed", labels=labels)
    indexed = GaugeMetricFamily(
        "kvferry_indexed_blocks", "Blocks that the router knows the worker to hold", labels=labels
    )
    for worker in workers:
        name = [worker.info.worker_id, worker.info.role.value]
        reachable.add_metric(name, worker.is_reachable)
        indexed.add_metric(name, worker.indexed_blocks)
        if worker.status is not None:
            load = worker.status.load
            running.add_metric(name, load.running)
            waiting.add_metric(name, load.waiting)
            tokens.add_metric(name, load.waiting_tokens)
            handoffs.add_metric(name, load.handoffs)
    yield from (reachable, running, waiting, tokens, handoffs, indexed)


def _of_kv(workers: Sequence[WorkerSummary]) -> Iterable[Metric]:
    usage = GaugeMetricFamily(
        "kvferry_kv_cache_usage_perc",
        "Share of the KV slots that is neither free nor evictable, 0 to 1",
        labels=["worker"],
    )
    slots = GaugeMetricFamily(
        "kvferry_kv_slots", "Slots by owner; one holds one token", labels=["worker", "account"]
    )
    host_slots = GaugeMetricFamily(
        "kvferry_host_kv_slots", "Slots of the host tier by owner", labels=["worker", "account"]
    )
    for worker in workers:
        if worker.status is None:
            continue
        name, accounts = worker.info.worker_id, worker.status.accounts
        if accounts.total:
            held = accounts.total - accounts.free - accounts.evictable
            usage.add_metric([name], held / accounts.total)
        _add_accounts(slots, name, accounts)
        if worker.status.host_accounts is not None:
            _add_accounts(host_slots, name, worker.status.host_accounts)
    yield from (usage, slots, host_slots)


def _add_accounts(
    family: GaugeMetricFamily, worker: str, accounts: KvAccounts | HostAccounts
) -> None:
    for account, count in asdict(accounts).items():
        if account not in _NOT_ACCOUNTS:
            family.add_metric([worker, account], count)


def _counters(workers: Sequence[WorkerSummary]) -> Metric:
    family = CounterMetricFamily(
        "kvferry_worker_events",
        "What a worker counted since it started",
        labels=["worker", "event"],
    )
    for worker in workers:
        if worker.status is not None:
            for event, count in worker.status.counters.items():
                family.add_metric([worker.info.worker_id, event], count)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvferry_{name}", text, value=value)
