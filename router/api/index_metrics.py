"""How the prefix indices of a router are doing, for `/metrics`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

    from router.fleet import Fleet

_GAUGES = {
    "workers": "Workers of the pool that get requests",
    "known_workers": "Of them, those whose blocks are known; the others attract no requests",
    "blocks": "Different blocks that are known",
    "nbytes": "Memory that they take",
    "nbytes_max": "Memory that they can take",
}


class IndexMetrics(Collector):
    """A collector of one router's registry."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: no other collector has these names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Every figure at this moment, and of each worker for how long it has been silent."""
        reports = self._fleet.index_reports()
        for field, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"kvferry_index_{field}", text, labels=["pool"])
            for pool, report in reports.items():
                gauge.add_metric([pool], getattr(report, field))
            yield gauge
        batches = CounterMetricFamily(
            "kvferry_index_batches",
            "Batches of KV events by what became of them",
            labels=["pool", "outcome"],
        )
        for pool, report in reports.items():
            for outcome, count in asdict(report.counts).items():
                batches.add_metric([pool, outcome], count)
        yield batches
        yield self._silence()

    def _silence(self) -> Metric:
        silence = GaugeMetricFamily(
            "kvferry_index_silence_seconds",
            "Since a worker's last KV events, or its sign that there are none",
            labels=["worker"],
        )
        for worker in self._fleet.summaries():
            if worker.events_age_s is not None:
                silence.add_metric([worker.info.worker_id], worker.events_age_s)
        return silence
