"""Half an hour of everything at once: nothing grows, nothing is lost, nothing fails.

`--soak-minutes` is for the length. Memory, threads and descriptors of each process are compared by
their medians in the second and in the last fifth of the time: minutes 6 to 12 and 24 to 30 of
thirty. A median does not see what a request needs for a moment; the first fifth is left out, in
which pools are touched for the first time and allocators find their sizes.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from cluster.client import Client
from kvferry.clock import MonotonicClock
from kvferry.convert import accounts_from_wire
from tests.support.local_cluster import local_cluster
from tests.support.process_watch import ProcessWatch
from tests.support.prompts import DATA
from tests.support.soak_load import SoakLoad
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.local_cluster import RunningCluster
    from tests.support.process_watch import Growth

CLIENTS = 6
KINDS = 8
SAMPLE_INTERVAL_S = 1.0
RESIDENT_GROWTH_MAX = 0.02
RESIDENT_BYTES_MORE_MAX = 4 * 2**20
"""What a process of any size may grow: allocators take and keep memory by the megabyte."""
THREADS_MORE_MAX = 1
DESCRIPTORS_MORE_MAX = 4
"""Connections of the six clients that happened to be open."""
THROUGHPUT_LEFT_MIN = 0.8
"""On a quiet machine it is above 0.95; a neighbour of a minute must not fail this."""

SETTINGS: dict[str, object] = {
    # 4,300 tokens, for six clients with prompts of up to 2,500: something is always evicted.
    "cache__memory_bytes": 192 * 2**20,
    "cache__host__memory_bytes": 256 * 2**20,
    "handoff__kv_return": "auto",
}
SPECULATING = {"speculation__ngram__max_draft": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [pytest.param({}, id="plain"), pytest.param(SPECULATING, id="speculating")]
)
def test_a_mixed_load_leaves_nothing_behind(
    more: dict[str, object], model_directory: Path, pytestconfig: pytest.Config
) -> None:
    seconds = 60.0 * float(pytestconfig.getoption("--soak-minutes"))
    with local_cluster(**(SETTINGS | more)) as cluster:
        load = SoakLoad(cluster.address, cluster.openai_url, _text(model_directory), CLIENTS)
        watch = ProcessWatch(cluster.directory, SAMPLE_INTERVAL_S)
        with watch, load:
            _wait(load, seconds)
        growths = watch.growths((0.2 * seconds, 0.4 * seconds), (0.8 * seconds, seconds))
        third = 22 / 30 * seconds / 3
        first = load.tokens_between(seconds - 3 * third, seconds - 2 * third)
        last = load.tokens_between(seconds - third, seconds)
        counters = _counters(cluster)
        report = {
            "minutes": seconds / 60,
            "ended": dict(load.ended),
            "problems": load.problems[:20],
            "tokens_per_s": [round(first / third, 1), round(last / third, 1)],
            "counters": {name: count for name, count in sorted(counters.items()) if count},
            "growth": [f"{g.process} {g.figure}: {g.early:.0f} -> {g.late:.0f}" for g in growths],
        }
        print(json.dumps(report, indent=1))  # noqa: T201
        assert load.problems == []
        assert len(load.ended) == KINDS, "a kind of request was never tried"
        _assert_ledger_clean(cluster)
        _assert_under_pressure(counters, speculating=bool(more))
        assert _grown(growths) == []
        assert last >= THROUGHPUT_LEFT_MIN * first


def _wait(load: SoakLoad, seconds: float) -> None:
    """Ends early when something fails: half an hour is long."""
    clock = MonotonicClock()
    stop = clock.now() + seconds
    while clock.now() < stop and not load.problems:
        time.sleep(0.2)


def _text(model_directory: Path) -> list[int]:
    data = json.loads(DATA.read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    text = data["preamble"] + "\n\n".join(data["questions"])
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _counters(cluster: RunningCluster) -> dict[str, int]:
    total: dict[str, int] = {}
    for worker in cluster.status().workers:
        for name, count in worker.counters.items():
            total[name] = total.get(name, 0) + count
    return total


def _assert_under_pressure(counters: dict[str, int], *, speculating: bool) -> None:
    """What makes a soak: otherwise a mild load would pass."""
    assert counters["sink_adopted"] > 0
    assert counters["samples_forked"] > 0
    assert counters["host_tokens_loaded"] > 0
    if speculating:
        assert counters["draft_tokens_accepted"] > 0


def _assert_ledger_clean(cluster: RunningCluster) -> None:
    def idle() -> bool:
        workers = cluster.status().workers
        return all(accounts_from_wire(worker.accounts).is_idle for worker in workers)

    wait_until("idle accounts", idle, state=cluster.status)
    with Client(cluster.address) as client:
        audits = client.audit("").audits
    assert len(audits) == 2
    for audit in audits:
        assert audit.failure == ""
        assert list(audit.report.violations) == []
        assert accounts_from_wire(audit.report.accounts).is_idle


def _grown(growths: list[Growth]) -> list[str]:
    allowed = {
        "resident_bytes": lambda growth: (
            growth.early + max(growth.early * RESIDENT_GROWTH_MAX, RESIDENT_BYTES_MORE_MAX)
        ),
        "threads": lambda growth: growth.early + THREADS_MORE_MAX,
        "descriptors": lambda growth: growth.early + DESCRIPTORS_MORE_MAX,
    }
    return [
        f"{g.process} {g.figure}: {g.early:.0f} -> {g.late:.0f}"
        for g in growths
        if g.late > allowed[g.figure](g)
    ]
