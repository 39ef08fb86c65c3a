"""All tiers against a naive model: see `tests.support.tiers_machine` for what is checked."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from kvferry.config import EvictionPolicy, WritePolicy
from tests.support.kv_caches import PAGE_SIZES
from tests.support.state_machines import run_machine
from tests.support.tiers_machine import TiersMachine

pytestmark = pytest.mark.property

STEPS = 60
CI_EXAMPLES = 3
CI_ROUNDS = 4
"""Tried in turn until the sample is worth something: a few examples may be all alike."""
WORTH_SEEING = {
    "device hit",
    "loaded",
    "load joined",
    "load failed",
    "load cut short",
    "released while loading",
    "filled while loading",
    "split in flight",
    "write failed",
    "write finished by eviction",
    "evicted to the host",
    "gone from the host",
    "out of slots",
}
"""What a sample must contain to have tested anything."""
WORTH_SEEING_IN_FILES = {"fetched", "restarted", "corrupt", "loaded"}


def _run(page_size, eviction, write_policy, *, with_files=False, examples, seed, seen) -> None:
    def machine() -> TiersMachine:
        return TiersMachine(page_size, eviction, write_policy, seen, with_files=with_files)

    run_machine(machine, examples=examples, steps=STEPS, seed=seed)


@pytest.mark.parametrize("with_files", [False, True], ids=["two tiers", "with files"])
def test_tiers_agree_with_the_model(with_files):
    """Each policy of either kind and each page size, but not each combination."""
    wanted = WORTH_SEEING_IN_FILES if with_files else WORTH_SEEING
    seen: Counter[str] = Counter()
    for number in range(CI_ROUNDS * len(EvictionPolicy)):
        _run(
            PAGE_SIZES[number % 4],
            list(EvictionPolicy)[number % 7],
            list(WritePolicy)[number % 3],
            with_files=with_files,
            examples=CI_EXAMPLES,
            seed=number,
            seen=seen,
        )
        if number + 1 >= len(EvictionPolicy) and wanted <= set(+seen):
            break
    assert set(+seen) >= wanted, wanted - set(+seen)
    assert seen["step"] >= 500


@pytest.mark.slow
@pytest.mark.parametrize("with_files", [False, True], ids=["two tiers", "with files"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_tiers_agree_with_the_model_for_long(page_size, with_files):
    """Every combination of eviction policy, write policy and page size: 100,000 steps in all."""
    seen: Counter[str] = Counter()
    while seen["step"] < 100_000 / (2 * len(PAGE_SIZES)):
        for eviction, write_policy in product(EvictionPolicy, WritePolicy):
            _run(
                page_size,
                eviction,
                write_policy,
                with_files=with_files,
                examples=10,
                seed=None,
                seen=seen,
            )
    wanted = WORTH_SEEING_IN_FILES if with_files else WORTH_SEEING
    assert set(+seen) >= wanted, wanted - set(+seen)
