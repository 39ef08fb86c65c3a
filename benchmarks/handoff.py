"""`python -m benchmarks.handoff`: how fast KV moves, and what that adds to a request.

Prints a JSON object a line with `--json`, else a table: first the transfer between two processes
against raw Gloo, then the latency of a local cluster against an aggregated one.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from benchmarks.command_line import as_text

if TYPE_CHECKING:
    from collections.abc import Iterator

_PARTS = ("transfer", "latency")


def main() -> None:
    """Measure the chosen parts and print a line per record."""
    parser = argparse.ArgumentParser(prog="benchmarks.handoff", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", choices=_PARTS, help="measure one part")
    parser.add_argument("--rounds", type=int, help="repetitions; each part has its own default")
    options = parser.parse_args()
    for part in _PARTS:
        if options.only not in (None, part):
            continue
        for record in _measure(part, options.rounds):
            print(json.dumps(record) if options.json else as_text(record), flush=True)  # noqa: T201


def _measure(part: str, rounds: int | None) -> Iterator[dict[str, object]]:
    # Imported when measured: the latency part loads a cluster, which the transfer part does not.
    if part == "transfer":
        from benchmarks import handoff_transfer

        return handoff_transfer.measure(rounds or handoff_transfer.ROUNDS)
    from benchmarks import handoff_latency

    return handoff_latency.measure(rounds or 1)


if __name__ == "__main__":
    main()
