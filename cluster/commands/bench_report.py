"""`bench report` and `bench compare`: what run records say, as a page and as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.flags import add_command
from cluster.commands.run_records import add_targets, read_from, targets_of
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    import argparse

    from bench.compare import Comparison
    from bench.record import RunRecord, Targets

_RESAMPLES_LEAST, _RESAMPLES_MOST = 100, 20_000


def add(commands: Any) -> None:
    """Add the commands of this file."""
    text = "write a page with plots on one or more run records, measured or simulated"
    report = add_command(commands, "report", _report, text)
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    report.add_argument(
        "--out", type=Path, default=Path("report.html"), help="default: report.html"
    )
    report.add_argument("--title", help="of the page; default: the names of the runs")
    text = "compare two run records: differences, and how sure they are"
    compare = add_command(commands, "compare", _compare, text)
    compare.add_argument("a", type=Path, metavar="A.json")
    compare.add_argument("b", type=Path, metavar="B.json")
    compare.add_argument("--resamples", type=int, default=2000, help="samples drawn, default 2000")
    compare.add_argument("--level", type=float, default=0.95, help="of the intervals, default 0.95")
    compare.add_argument("--seed", type=int, default=0, help="of the samples, default 0")
    compare.add_argument("--json", action="store_true", help="print all of it as JSON")
    for command in (report, compare):
        add_targets(command, "judge all runs by these; default: their own")


def _report(arguments: argparse.Namespace) -> None:
    # numpy and templates are not loaded for the other commands.
    from bench.report import write_report

    targets = targets_of(arguments.targets)
    records = [_judged(path, targets) for path in arguments.runs]
    try:
        write_report(records, arguments.out, arguments.title)
    except OSError as error:
        raise InvalidInput("out", f"{arguments.out} cannot be written: {error.strerror}") from None
    size = arguments.out.stat().st_size
    print(f"{arguments.out}: {len(records)} runs, {size / 1024:.0f} KiB")  # noqa: T201


def _compare(arguments: argparse.Namespace) -> None:
    from bench.compare import compare

    if not _RESAMPLES_LEAST <= arguments.resamples <= _RESAMPLES_MOST:
        text = f"must be {_RESAMPLES_LEAST} to {_RESAMPLES_MOST}, not {arguments.resamples}"
        raise InvalidInput("resamples", text)
    if not 0.5 <= arguments.level <= 0.999:
        raise InvalidInput("level", f"must be 0.5 to 0.999, not {arguments.level}")
    if arguments.seed < 0:
        raise InvalidInput("seed", f"must be 0 or above, not {arguments.seed}")
    targets = targets_of(arguments.targets)
    a, b = _judged(arguments.a, targets), _judged(arguments.b, targets)
    comparison = compare(
        a, b, resamples=arguments.resamples, level=arguments.level, seed=arguments.seed
    )
    if arguments.json:
        print(json.dumps(comparison.as_json()))  # noqa: T201
    else:
        print(_as_text(comparison))  # noqa: T201


def _judged(path: Path, targets: Targets | None) -> RunRecord:
    from bench.summary import with_targets

    record = read_from(path)
    return record if targets is None else with_targets(record, targets)


def _as_text(comparison: Comparison) -> str:
    from bench.report import comparison_table, comparison_text

    table = comparison_table(comparison)
    rows = [[cell.replace("\u00a0", " ") for cell in row] for row in (table.header, *table.rows)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    # A name must not steer the terminal.
    names = ["".join(c if c.isprintable() else "?" for c in name) for name in comparison.names]
    lines = [f"A  {names[0]}", f"B  {names[1]}", ""]
    for row in rows:
        first, *numbers, last = row
        middle = (f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:-1], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *middle, last]).rstrip())
    lines += ["", comparison_text(comparison), *comparison.notes]
    counts = [", ".join(f"{n} {name}" for name, n in each.items()) for each in comparison.outcomes]
    lines += [f"A: {counts[0]}", f"B: {counts[1]}"]
    if comparison.differs:
        lines.append("What else differs:")
        lines += [f"  {name}: {a!r}, {b!r}" for name, a, b in comparison.differs]
    return "\n".join(lines)
