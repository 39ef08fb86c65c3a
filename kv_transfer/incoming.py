"""Where payloads of a session go: into the slots of a live handoff, or nowhere.

The lane's thread asks the desk to take a payload. A handoff's *gate* makes "is it live?" and the
scatter one indivisible thing: once the engine thread has closed it, nothing is written to the
handoff's slots any more, and they may have another owner.
"""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kv_transfer.protocol.errors import BadMessage
from mem_cache.layout import KvPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kv_transfer.chunk_header import ChunkHeader
    from kv_transfer.protocol.coverage import Coverage
    from kv_transfer.protocol.lanes import Heads
    from kvferry.ids import SlotIndices
    from mem_cache.kv_pool import KvPool


class ChunkFate(Enum):
    """What became of a payload."""

    SCATTERED = "scattered"
    DROPPED = "dropped"
    """Its handoff has ended, or was never here."""
    REJECTED = "rejected"
    """It is not what its handoff may get; the handoff is to be ended."""


@dataclass(frozen=True, slots=True)
class TakenChunk:
    """A payload that the desk has dealt with."""

    header: ChunkHeader
    fate: ChunkFate
    remaining: int = 0
    """Cells of the handoff that are still to come on all lanes, if scattered."""
    moved_bytes: int = 0
    """What has come for the handoff on all lanes, this payload included, if scattered."""
    reason: str = ""
    """Why it was rejected."""


class IncomingLane:
    """One lane's part of a handoff that is being received."""

    def __init__(self, pool: KvPool, heads: Heads, coverage: Coverage) -> None:
        self.pool = pool
        self.heads = heads
        self.coverage = coverage

    def part(self, header: ChunkHeader) -> KvPart:
        """Where a payload belongs in the pool."""
        region = header.region
        return KvPart(region.layer_start, region.layer_stop, self.heads.start, self.heads.stop)


class IncomingStream:
    """Inbound slots of one handoff, and what has come."""

    def __init__(
        self, number: int, slots: SlotIndices, token_start: int, lanes: Mapping[int, IncomingLane]
    ) -> None:
        """`slots` (int64 [tokens]) hold the tokens from `token_start` on."""
        self.number = number
        self.slots = slots
        self.token_start = token_start
        self.lanes = lanes
        self.gate = threading.Lock()
        self.is_open = True
        self.moved_bytes = 0

    @property
    def remaining(self) -> int:
        """Cells still to come on all lanes."""
        return sum(lane.coverage.remaining for lane in self.lanes.values())

    def slots_of(self, header: ChunkHeader) -> SlotIndices:
        """The slots of a payload's tokens."""
        start = header.region.token_start - self.token_start
        return self.slots[start : start + header.region.tokens]


class ReceiveDesk:
    """All handoffs of one session that may receive.

    | method | thread |
    |---|---|
    | expect, forget | engine |
    | take | a lane's |
    """

    def __init__(self) -> None:
        self._streams: dict[int, IncomingStream] = {}

    def expect(self, stream: IncomingStream) -> None:
        """From now on its payloads are taken. Before the peer is told its number."""
        assert stream.number not in self._streams, f"stream {stream.number} is known"
        self._streams[stream.number] = stream

    def forget(self, stream: IncomingStream) -> None:
        """After it returns nothing is written to the stream's slots."""
        with stream.gate:
            stream.is_open = False
        self._streams.pop(stream.number, None)

    def take(self, lane: int, header: ChunkHeader, payload: torch.Tensor) -> TakenChunk:
        """Scatter `payload` (uint8 [payload_bytes]) if its handoff is live. The one place.

        Raises nothing: what is wrong with a payload concerns its handoff alone.
        """
        stream = self._streams.get(header.stream)
        if stream is None:
            return TakenChunk(header, ChunkFate.DROPPED)
        with stream.gate:
            if not stream.is_open:
                return TakenChunk(header, ChunkFate.DROPPED)
            try:
                _scatter(stream, lane, header, payload)
            except BadMessage as error:
                stream.is_open = False
                return TakenChunk(header, ChunkFate.REJECTED, reason=str(error))
            stream.moved_bytes += header.payload_bytes
            return TakenChunk(header, ChunkFate.SCATTERED, stream.remaining, stream.moved_bytes)


def _scatter(stream: IncomingStream, lane: int, header: ChunkHeader, payload: torch.Tensor) -> None:
    target = stream.lanes.get(lane)
    if target is None:
        raise BadMessage(f"a payload on lane {lane}, which carries nothing of this handoff")
    target.coverage.check(header.region)
    part = target.part(header)
    expected = target.pool.payload_bytes(header.region.tokens, part)
    if not expected == header.payload_bytes == payload.numel():
        raise BadMessage(f"{header.payload_bytes} bytes for {header.region}, not {expected}")
    if header.checksum and zlib.crc32(payload.numpy().data) != header.checksum:
        raise BadMessage(f"checksum of {header.region} differs")
    target.pool.scatter(stream.slots_of(header), part, payload)
    target.coverage.take(header.region)
