"""What travels with each payload on a lane: whose it is, and which piece."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kv_transfer.protocol.errors import BadMessage
from kv_transfer.protocol.region import Region

_FORMAT = struct.Struct("<QQQIIIIIB3x")
HEADER_BYTES = _FORMAT.size
assert HEADER_BYTES % 8 == 0, "a header is whole words"


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """One payload of one lane. `seq` counts the payloads of the lane's generation from 0."""

    seq: int
    stream: int
    """Number that the sink gave to the handoff in its grant; never used again in a session."""
    region: Region
    payload_bytes: int
    checksum: int
    """CRC-32 of the payload; 0 when checksums are off."""
    is_last: bool
    """Nothing else waited to be sent when this was."""

    def pack(self) -> bytes:
        """`HEADER_BYTES` bytes."""
        piece = self.region
        return _FORMAT.pack(
            self.seq,
            self.stream,
            self.payload_bytes,
            piece.token_start,
            piece.token_stop,
            piece.layer_start,
            piece.layer_stop,
            self.checksum,
            self.is_last,
        )


def unpack_header(raw: bytes) -> ChunkHeader:
    """The inverse of `ChunkHeader.pack`. Raises `BadMessage` for an empty piece."""
    seq, stream, payload_bytes, *piece, checksum, is_last = _FORMAT.unpack(raw)
    token_start, token_stop, layer_start, layer_stop = piece
    if token_start >= token_stop or layer_start >= layer_stop:
        raise BadMessage(f"payload {seq} of tokens and layers {piece}")
    region = Region(token_start, token_stop, layer_start, layer_stop)
    return ChunkHeader(seq, stream, region, payload_bytes, checksum, bool(is_last))
