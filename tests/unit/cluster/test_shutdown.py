from __future__ import annotations

import pytest

from cluster.shutdown import run_every_step


def test_every_step_runs_in_order_and_the_first_error_is_raised(caplog):
    done = []

    def fail(name):
        done.append(name)
        raise ValueError(name)

    with pytest.raises(ValueError, match="second"):
        run_every_step(
            lambda: done.append("first"),
            lambda: fail("second"),
            lambda: fail("third"),
            lambda: done.append("fourth"),
        )
    assert done == ["first", "second", "third", "fourth"]
    assert "third" in caplog.text


def test_without_an_error_nothing_is_raised():
    run_every_step()
    run_every_step(lambda: 1)
