"""Every part of shared work is done once, by whoever is there."""

from __future__ import annotations

import threading
from contextlib import closing

import numpy as np
import pytest

from engine.crew import Crew, share
from engine.native_math import task
from engine.native_memory import add, load

PARTS = 40


@task
def _count(arguments: int, index: int) -> int:
    """Arguments: a counter per part."""
    add(arguments + 8 * index, 1)
    return 0


@task
def _meet(arguments: int, index: int) -> int:
    """Arguments: a counter. A part ends when as many as there are parts have begun."""
    add(arguments, 1)
    while load(arguments) < 2:
        pass
    return 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_part_is_done_once(threads: int) -> None:
    counts = np.zeros(PARTS, dtype=np.int64)
    with closing(Crew(threads)) as crew:
        for done in range(200):
            parts = done % PARTS
            counts[:] = 0
            share(crew.board, _count.address, counts, parts)
            assert counts.tolist() == [1] * parts + [0] * (PARTS - parts)


def test_two_threads_work_at_the_same_time() -> None:
    """Awake or asleep: a part that waits for another one ends only if somebody else takes that."""
    with closing(Crew(2)) as crew:
        for pause_s in (0.0, 0.02, 0.0, 0.02):
            begun = np.zeros(1, dtype=np.int64)
            threading.Event().wait(pause_s)
            share(crew.board, _meet.address, begun, 2)
            assert begun[0] == 2


def test_a_crew_that_was_closed_works_alone() -> None:
    crew = Crew(3)
    before = threading.active_count()
    crew.close()
    crew.close()
    assert threading.active_count() == before - 2
    counts = np.zeros(PARTS, dtype=np.int64)
    share(crew.board, _count.address, counts, PARTS)
    assert counts.tolist() == [1] * PARTS
