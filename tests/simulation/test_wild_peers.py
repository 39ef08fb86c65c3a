"""Anything a peer can say: no driver raises, and all KV is given back."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.sim_wild import WildRun

RUNS = 60


@pytest.mark.parametrize("wildness", [0.03, 0.3, 0.8])
def test_no_message_raises_or_keeps_kv(wildness):
    happened: Counter[str] = Counter()
    for seed in range(RUNS):
        run = WildRun(seed, wildness)
        try:
            run.run()
        except Exception as error:
            moves = " | ".join(run.trace[-30:])
            raise AssertionError(f"seed {seed}: {error!r} after {moves}") from error
        happened += run.happened
    assert happened["unknown_messages"] > 10
    assert happened["illegal_messages"] > 10
    if wildness < 0.1:
        # The runs also get far, so that every state was lied to.
        assert happened["sink_adopted"] > 10
        assert happened["chunks_received"] > RUNS
