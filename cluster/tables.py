"""Plain text tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.status_json import HOST_KV_OWNERS, KV_OWNERS, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvferry.rpc.v1 import inference_pb2 as inference


ACCOUNTS_LEGEND = (
    "evictable: cached, free when needed; protected: cached, in use; private: of one request;\n"
    "inbound: on the way here from a worker, loading: from a lower tier; pinned: being sent;\n"
    "rows: requests tracked (docs/kv-ownership.md)"
)


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; columns of numbers are aligned at the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    numeric = [all(_is_number(line[column]) for line in lines[1:]) for column in range(len(header))]

    def render(line: list[str]) -> str:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([render(lines[0]), rule, *map(render, lines[1:])])


def _is_number(cell: str) -> bool:
    # Counts with a unit or a bound ("45 KiB", "3/64") read like numbers; addresses do not.
    return not cell or (cell[:1].isdigit() and ":" not in cell)


def format_bytes(count: int) -> str:
    """Binary units, four significant digits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def workers_table(status: inference.ClusterStatusResponse) -> str:
    """Who the workers are and what they do."""
    header = (
        *("worker", "role", "pid", "incarnation", "address", "state"),
        *("running", "waiting", "handoffs", "indexed blocks"),
    )
    return format_table(
        header,
        (
            (
                *(worker.worker_id, worker.role, str(worker.pid), f"#{worker.incarnation:016x}"),
                *(worker.address, state_of(worker)),
                *(str(worker.load.running), str(worker.load.waiting)),
                *(str(worker.load.handoffs), _indexed_blocks(worker)),
            )
            for worker in status.workers
        ),
    )


def _indexed_blocks(worker: inference.WorkerSummary) -> str:
    if not worker.kv_index.HasField("known_to"):
        return "unknown"
    return f"{worker.indexed_blocks}{' and more' if worker.kv_index.full else ''}"


def audit_table(answer: inference.AuditResponse) -> str:
    """What the ledger checks of each worker found."""
    header = ("worker", "ledger", "slots", "rows in use", "steps done", "took")
    return format_table(header, map(_audit_row, answer.audits))


def _audit_row(entry: inference.WorkerAudit) -> tuple[str, ...]:
    if not entry.HasField("report"):
        return (entry.worker_id, "not checked", *4 * ("",))
    report = entry.report
    return (
        *(entry.worker_id, f"{len(report.violations)} wrong" if report.violations else "right"),
        *(str(report.accounts.total), str(report.accounts.rows_live)),
        *(str(report.engine_steps), f"{report.duration_ms:.1f} ms"),
    )


def accounts_table(status: inference.ClusterStatusResponse) -> str:
    """The KV slots of each worker by owner; the first six add up to the total."""
    header = ("worker", *KV_OWNERS, "pinned", "rows")
    return format_table(
        header,
        (
            (
                worker.worker_id,
                *(str(getattr(worker.accounts, name)) for name in KV_OWNERS),
                str(worker.accounts.outbound_pinned),
                f"{worker.accounts.rows_live}/{worker.accounts.rows_total}",
            )
            for worker in status.workers
        ),
    )


def host_accounts_table(status: inference.ClusterStatusResponse) -> str:
    """The slots of each host tier by owner; the first five add up to the total."""
    return format_table(
        ("worker", *HOST_KV_OWNERS),
        (
            (
                worker.worker_id,
                *(str(getattr(worker.host_accounts, name)) for name in HOST_KV_OWNERS),
            )
            for worker in status.workers
            if worker.HasField("host_accounts")
        ),
    )


def counters_table(status: inference.ClusterStatusResponse) -> str:
    """What each worker counted since its start, one column per worker."""
    names = sorted({name for worker in status.workers for name in worker.counters})
    return format_table(
        ("counter", *(worker.worker_id for worker in status.workers)),
        (
            (name, *(str(worker.counters.get(name, 0)) for worker in status.workers))
            for name in names
        ),
    )
