from __future__ import annotations

import pytest

from kv_transfer.protocol.coverage import Coverage
from kv_transfer.protocol.errors import BadMessage
from kv_transfer.protocol.region import Region


@pytest.fixture
def coverage():
    """Tokens [4, 12) of 3 layers."""
    return Coverage(4, 12, 3)


def take(coverage, *bounds):
    region = Region(*bounds)
    coverage.check(region)
    coverage.take(region)


def test_every_cell_once_in_any_order_of_tokens(coverage):
    take(coverage, 8, 12, 0, 3)
    take(coverage, 4, 6, 0, 1)
    take(coverage, 4, 6, 1, 3)
    assert coverage.remaining == 6
    take(coverage, 6, 8, 0, 2)
    take(coverage, 6, 8, 2, 3)
    assert coverage.remaining == 0


@pytest.mark.parametrize("outside", [(3, 8, 0, 1), (8, 13, 0, 1), (4, 8, 0, 4)])
def test_what_was_not_granted_is_refused(coverage, outside):
    with pytest.raises(BadMessage, match="were granted"):
        coverage.check(Region(*outside))
    assert coverage.remaining == 24


@pytest.mark.parametrize("again", [(4, 6, 0, 2), (5, 7, 0, 2), (4, 6, 1, 2)])
def test_a_cell_that_is_here_is_refused(coverage, again):
    take(coverage, 4, 6, 0, 2)
    with pytest.raises(BadMessage, match="comes next"):
        coverage.check(Region(*again))


def test_layers_come_in_order(coverage):
    with pytest.raises(BadMessage, match="comes next"):
        coverage.check(Region(4, 6, 1, 2))


def test_a_full_hit_expects_nothing():
    assert Coverage(8, 8, 3).remaining == 0
