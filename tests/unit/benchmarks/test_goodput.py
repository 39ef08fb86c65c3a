"""Goodput: the search for the highest load, and what is said of those that are not searched."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from bench.traces import read_trace
from benchmarks import router as benchmark
from benchmarks.goodput import (
    HIGHEST_RUNG,
    LADDER_STEP,
    LOWEST_RUNG,
    GoodputSearch,
    load_of,
    rung_near,
)
from benchmarks.replay import Replay, ReplaySettings, Workload
from tests.unit.benchmarks.test_replay import sessions_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class RungsThatHold(GoodputSearch):
    """A search over loads of which it is known whether they hold."""

    holding: Callable[[int], bool] = field(kw_only=True)

    def holds(self, rung: int) -> bool:
        assert LOWEST_RUNG <= rung <= HIGHEST_RUNG
        return self.holding(rung)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sessions_file(tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def workload(path: Path) -> Workload:
    return Workload(read_trace(path))


def search(workload: Workload, holding: Callable[[int], bool]) -> RungsThatHold:
    settings = ReplaySettings(workers=4, seed=1)
    policy = benchmark.CONTENDERS["min_ttft"]
    return RungsThatHold(workload, policy, settings, 0.1, holding=holding)


@pytest.mark.parametrize("last", [LOWEST_RUNG, -77, -1, 0, 1, 5, 200, HIGHEST_RUNG])
def test_the_highest_rung_is_found_from_either_side(workload: Workload, last: int) -> None:
    found = search(workload, lambda rung: rung <= last)
    assert found.highest() == last
    for best in (-100, 3):
        if last != HIGHEST_RUNG:
            assert found.highest_beyond(best) == (last if last > best else None)
    assert found.highest_beyond(HIGHEST_RUNG) == (last if last == HIGHEST_RUNG else None)


def test_none_holds(workload: Workload) -> None:
    assert search(workload, lambda rung: False).highest() is None


def test_a_rung_that_fails_does_not_end_the_search(workload: Workload) -> None:
    """Where all between 11 and 30 fail but one, which is a step above, and 47 is above that."""
    found = search(workload, lambda rung: rung <= 10 or rung in {26, 30, 46, 47})
    assert found.highest() == 47
    assert found.highest_beyond(10) == 47


def test_loads_are_a_ladder() -> None:
    assert load_of(1) / load_of(0) == pytest.approx(LADDER_STEP)
    assert [rung_near(load_of(rung)) for rung in (-5, 0, 77)] == [-5, 0, 77]
    assert rung_near(1e9) == HIGHEST_RUNG


def test_goodput_is_the_load_at_which_the_limit_is_held(workload: Workload) -> None:
    policy, settings = benchmark.CONTENDERS["min_ttft"], ReplaySettings(workers=4, seed=1)
    rungs = [GoodputSearch(workload, policy, settings, limit).highest() for limit in (0.03, 0.1)]
    assert rungs[0] is not None
    assert rungs[1] is not None
    assert rungs[0] < rungs[1]
    for rung, holds in ((rungs[1], True), (rungs[1] + 1, False)):
        at_rung = ReplaySettings(workers=4, seed=1, load=load_of(rung))
        assert (Replay(workload, policy, at_rung).run().quantile_s(0.9) <= 0.1) == holds
    assert GoodputSearch(workload, policy, settings, 0.001).highest() is None


def test_rivals_are_searched_only_if_they_are_better(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--trace", str(path), "--workers", "4", "--goodput", "0.1", "--json"]
    assert benchmark.main(arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["policy"] for row in rows} == benchmark.CONTENDERS.keys()
    assert rows[0]["policy"] == benchmark.OURS
    best = 0.0
    for row in rows:
        if "goodput_tok_s_worker" in row:
            assert row["load"] > best
            best = row["load"]
        else:
            assert row["below_tok_s_worker"] > 0
            assert row["load"] == pytest.approx(best * LADDER_STEP, rel=1e-3)
