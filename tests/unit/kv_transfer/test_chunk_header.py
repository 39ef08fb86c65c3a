from __future__ import annotations

import pytest

from kv_transfer.chunk_header import HEADER_BYTES, ChunkHeader, unpack_header
from kv_transfer.protocol.errors import BadMessage
from kv_transfer.protocol.region import Region


@pytest.mark.parametrize("is_last", [True, False])
def test_what_is_packed_is_unpacked(is_last):
    region = Region(2**31, 2**32 - 1, 3, 61)
    header = ChunkHeader(2**40, 2**50, region, 2**33, 2**32 - 1, is_last)
    assert len(header.pack()) == HEADER_BYTES
    assert unpack_header(header.pack()) == header


@pytest.mark.parametrize("place", [24, 32])
def test_a_header_of_no_tokens_or_no_layers_is_refused(place):
    raw = bytearray(ChunkHeader(5, 1, Region(0, 1, 0, 1), 64, 0, is_last=False).pack())
    raw[place : place + 8] = bytes(8)
    with pytest.raises(BadMessage, match="payload 5"):
        unpack_header(bytes(raw))
