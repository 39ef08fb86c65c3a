"""A process that is killed while it files KV pages, again and again in the same folder."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.file_tier_child import (
    FILE_BYTES,
    NUM_PAGES,
    PAGE_BYTES,
    ROOM,
    bytes_of_page,
    digest_of_page,
    open_tier,
    tokens_of_page,
)

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tests.support.file_tier_child"]


def file_until_killed(folder: Path, seed: int, rng: random.Random) -> list[int]:
    """Let a child file pages and kill it at a random moment; which it said to have filed."""
    command = [*COMMAND, str(folder), str(seed)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        filed = [int(child.stdout.readline()) for _ in range(rng.randrange(1, 40))]
        # A page takes well below a millisecond: any part of it may be under way.
        threading.Event().wait(rng.uniform(0, 0.002))
    finally:
        child.kill()
        rest = child.stdout.read()
        child.stdout.close()
        child.wait(60)
    # A line may be torn as well: what has no end wasn't said.
    return filed + [int(line) for line in rest.split("\n")[:-1]]


def pages_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


def most_recent(filed: list[int], count: int) -> set[int]:
    return set(list(dict.fromkeys(reversed(filed)))[:count])


def check_what_is_left(folder: Path, filed: list[int]) -> None:
    assert sum(path.stat().st_size for path in pages_below(folder)) <= ROOM * FILE_BYTES
    tier = open_tier(folder)
    assert all(path.stat().st_size == FILE_BYTES for path in pages_below(folder)), (
        "torn, or not ours"
    )
    there = {number for number in range(NUM_PAGES) if tier.has(digest_of_page(number))}
    assert len(there) == len(pages_below(folder)) == tier.statistics().files
    # One may have been evicted for the page that was being written.
    assert there >= most_recent(filed, ROOM - 1), "a page that was filed is gone"
    for number in there:
        out = bytearray(PAGE_BYTES)
        assert tier.get(digest_of_page(number), tokens_of_page(number), memoryview(out))
        assert out == bytes_of_page(number)
    assert tier.statistics().corrupt == 0
    tier.close()


def run_kills(folder: Path, kills: int) -> int:
    """How many kills left a temporary file behind."""
    rng = random.Random(kills)
    interrupted = 0
    for seed in range(kills):
        filed = file_until_killed(folder, seed, rng)
        interrupted += any(path.suffix == ".tmp" for path in pages_below(folder))
        check_what_is_left(folder, filed)
    return interrupted


def test_whatever_is_there_after_kill_9_reads_back_exactly(tmp_path):
    run_kills(tmp_path, 8)


@pytest.mark.slow
def test_whatever_is_there_after_many_kills_reads_back_exactly(tmp_path):
    assert run_kills(tmp_path, 60) > 0, "no kill came in the middle of a page"
