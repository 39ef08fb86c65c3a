"""Histograms and a counter that cost next to nothing per event, for what happens per message.

The library's own take a lock per value and look at every bucket: together a tenth of what a message
costs a router. These are counted on its event loop alone, and read there for `/metrics`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from kvferry.clock import unix_time_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import CollectorRegistry, Metric


class EventSeries:
    """How many values fell into each bucket, and by which request the last of them did."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: list[Exemplar | None] = [None] * len(self._counts)
        self._sum = 0.0

    def observe(self, value: float, trace_id: str = "") -> None:
        """Count a value. `trace_id`: of the request it belongs to, shown to whoever asks."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if trace_id:
            self._exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, unix_time_s())

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """The library's form of it."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        counts = itertools.accumulate(self._counts)
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = [
            (name, count) if exemplar is None else (name, count, exemplar)
            for name, count, exemplar in zip(names, counts, self._exemplars, strict=True)
        ]
        family.add_metric(labels, buckets, self._sum)


class EventHistogram(Collector):
    """Series of one name, one for each set of label values that was asked for."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        labels: Sequence[str] = (),
    ) -> None:
        """`bounds` ascend; each is the largest value of its bucket, and one more has the rest."""
        self._name, self._text = name, text
        self._bounds = tuple(bounds)
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], EventSeries] = {}
        if not labels:
            self.of()
        registry.register(self)

    def of(self, *values: str) -> EventSeries:
        """That of these label values."""
        series = self._series.get(values)
        if series is None:
            assert len(values) == len(self._labels), f"{self._name} has labels {self._labels}"
            series = self._series[values] = EventSeries(self._bounds)
        return series

    def collect(self) -> Iterable[Metric]:
        """The library's form of it."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            series.add_to(family, values)
        yield family


class EventCounter(Collector):
    """A sum of whole numbers."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._total = 0
        registry.register(self)

    def inc(self, number: int) -> None:
        """Add to it."""
        self._total += number

    def collect(self) -> Iterable[Metric]:
        """The library's form of it."""
        yield CounterMetricFamily(self._name, self._text, self._total)
