from __future__ import annotations

import pytest

from kv_transfer.protocol.region import Region


@pytest.mark.parametrize("bounds", [(4, 4, 0, 1), (5, 4, 0, 1), (-1, 4, 0, 1), (0, 4, 2, 2)])
def test_never_empty(bounds):
    with pytest.raises(AssertionError, match=r"no (tokens|layers)"):
        Region(*bounds)


@pytest.mark.parametrize("cells_max", range(3, 40))
def test_cuts_are_the_region_and_none_is_too_large(cells_max):
    rest, pieces = Region(5, 16, 1, 4), []
    while rest is not None:
        piece, rest = rest.cut(cells_max)
        pieces.append(piece)
    assert max(piece.cells for piece in pieces) <= cells_max
    assert [(p.layer_start, p.layer_stop) for p in pieces] == [(1, 4)] * len(pieces)
    stops = [piece.token_stop for piece in pieces]
    assert [piece.token_start for piece in pieces] == [5, *stops[:-1]]
    assert stops[-1] == 16


def test_a_buffer_that_does_not_hold_a_token_cuts_nothing():
    with pytest.raises(AssertionError, match="do not hold a token"):
        Region(0, 4, 0, 3).cut(2)
