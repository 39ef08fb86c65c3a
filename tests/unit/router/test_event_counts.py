"""What is counted per message is exported as the library would have done it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.api.event_counts import EventCounter, EventHistogram

BOUNDS = (0.01, 0.1, 1.0, 60.0)
VALUES = (0.0, 0.01, 0.0101, 0.5, 60.0, 1e9)


def lines(registry: CollectorRegistry) -> list[str]:
    """But for when it was made, which nobody asks for."""
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]


def test_a_histogram_reads_like_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = EventHistogram("took_seconds", "How long", BOUNDS, ours)
    reference = Histogram("took_seconds", "How long", buckets=BOUNDS, registry=theirs)
    assert lines(ours) == lines(theirs)
    for value in VALUES:
        histogram.of().observe(value)
        reference.observe(value)
    assert lines(ours) == lines(theirs)


def test_a_counter_reads_like_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = EventCounter("said", "Words", ours)
    reference = Counter("said", "Words", registry=theirs)
    for number in (1, 41):
        counter.inc(number)
        reference.inc(number)
    assert lines(ours) == lines(theirs)
