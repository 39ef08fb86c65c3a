"""What `kvferry top` shows: lines of text made of what a router tells. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from cluster.tables import format_bytes, format_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvferry.rpc.v1 import inference_pb2 as inference

_BAR_CELLS = 20
_SHADES = (
    ("private", "#"),
    ("inbound", ">"),
    ("loading", "<"),
    ("protected", "="),
    ("evictable", "-"),
)
"""Accounts from what is in use to what is cached; what is free is a point."""

LEGEND = "KV  # private  > inbound  < loading  = protected  - evictable  . free"


def top_lines(
    status: inference.ClusterStatusResponse, traces: inference.TracesResponse
) -> list[str]:
    """Summary, workers and the latencies of the requests that are told."""
    workers = status.workers
    reachable = sum(worker.reachable for worker in workers)
    running = sum(worker.load.running for worker in workers)
    lines = [
        f"kvferry  {status.requests_in_flight} requests in flight, {running} running at workers, "
        f"{reachable} of {len(workers)} workers answer",
        _latencies(traces.requests),
        "",
    ]
    header = (
        *("worker", "role", "state", "running", "waiting", "handoffs", "KV held"),
        *("prompts/s", "link/s", "accounts"),
    )
    return [*lines, *format_table(header, map(_row, workers)).splitlines(), "", LEGEND]


def account_bar(accounts: inference.KvAccounts) -> str:
    """A cell for each twentieth of the slots; an account that has any shows at least one."""
    if not accounts.total:
        return ""
    cells = "".join(
        sign * max(round(_BAR_CELLS * slots / accounts.total), 1)
        for name, sign in _SHADES
        if (slots := getattr(accounts, name))
    )
    return cells[:_BAR_CELLS].ljust(_BAR_CELLS, ".")


def _row(worker: inference.WorkerSummary) -> tuple[str, ...]:
    load, accounts = worker.load, worker.accounts
    held = accounts.total - accounts.free - accounts.evictable
    state = "ok" if worker.reachable else "no answer"
    return (
        *(worker.worker_id, worker.role, "draining" if worker.draining else state),
        *(str(load.running), str(load.waiting), str(load.handoffs)),
        f"{100 * held / accounts.total:.0f} %" if accounts.total else "",
        f"{load.prefill_tokens_per_s:.0f}" if load.prefill_tokens_per_s else "",
        format_bytes(round(load.link_bytes_per_s)) if load.link_bytes_per_s else "",
        account_bar(accounts),
    )


def _latencies(requests: Iterable[inference.RequestTrace]) -> str:
    told = list(requests)
    first = [value for each in told for value in _first_token_s(each)]
    between = [value for each in told for value in _between_tokens_s(each)]
    failed = sum(each.outcome == "failed" for each in told)
    return (
        f"last {len(told)} requests: first token {_milliseconds(first)}, between tokens "
        f"{_milliseconds(between)} (medians), {failed} failed"
    )


def _first_token_s(request: inference.RequestTrace) -> Iterator[float]:
    """One value, or none where no token has come."""
    for span in request.span.children:
        waited = span.attributes.get("kvferry.attempt.first_token_s", "")
        if waited:
            yield span.start_s + float(waited)
            return


def _between_tokens_s(request: inference.RequestTrace) -> Iterator[float]:
    """One value, or none where there were not two tokens, or more are to come."""
    tokens = int(request.span.attributes.get("gen_ai.usage.output_tokens", "0"))
    for first_s in _first_token_s(request):
        if tokens > 1 and request.outcome == "succeeded":
            yield (request.duration_s - first_s) / (tokens - 1)


def _milliseconds(values_s: list[float]) -> str:
    return f"{1000 * median(values_s):.1f} ms" if values_s else "unknown"
