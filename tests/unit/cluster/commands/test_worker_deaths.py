from __future__ import annotations

import pytest

from cluster.commands.worker_deaths import death_of
from kvferry.errors import InvalidInput
from kvferry.ids import WorkerId
from simulator.settings import WorkerDeath


def test_who_dies_and_comes_back():
    assert death_of("decode-3@60") == WorkerDeath(WorkerId("decode-3"), 60.0)
    assert death_of("prefill-0@1.5+5") == WorkerDeath(WorkerId("prefill-0"), 1.5, 5.0)


@pytest.mark.parametrize("text", ["", "decode-3", "@3", "a@", "a@x", "a@-1", "a@1+", "a@1+nan"])
def test_what_is_no_death_is_refused(text):
    with pytest.raises(InvalidInput, match="death"):
        death_of(text)
