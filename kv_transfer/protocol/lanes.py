"""Lanes of a link: which ranks of two workers exchange which heads.

A worker of tensor-parallel degree R has R ranks, each with 1/R of the KV heads. Source rank i and
sink rank j share a lane where their heads overlap; with one rank on both sides there is one lane
with all heads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """KV heads [start, stop) in the numbering of one rank's pool."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Lane:
    """One pair of ranks, and where the heads that they share lie on either side."""

    index: int
    source_rank: int
    sink_rank: int
    source_heads: Heads
    sink_heads: Heads


def lanes_between(source_ranks: int, sink_ranks: int, heads: int) -> tuple[Lane, ...]:
    """All lanes, by source rank and then sink rank. `heads` is the total of the model.

    Both degrees must divide `heads`.
    """
    assert heads % source_ranks == 0, f"{heads} heads on {source_ranks} ranks"
    assert heads % sink_ranks == 0, f"{heads} heads on {sink_ranks} ranks"
    per_source, per_sink = heads // source_ranks, heads // sink_ranks
    lanes: list[Lane] = []
    for source in range(source_ranks):
        for sink in range(sink_ranks):
            start = max(source * per_source, sink * per_sink)
            stop = min((source + 1) * per_source, (sink + 1) * per_sink)
            if start < stop:
                at_source, at_sink = source * per_source, sink * per_sink
                lanes.append(
                    Lane(
                        len(lanes),
                        source,
                        sink,
                        Heads(start - at_source, stop - at_source),
                        Heads(start - at_sink, stop - at_sink),
                    )
                )
    return tuple(lanes)
