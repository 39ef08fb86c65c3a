"""What may leave on a lane: pieces of the KV of handoffs, gathered when there is a buffer.

The engine thread submits pieces with the slots that hold them; the lane's thread gathers. A
handoff's *gate* makes "may its slots still be read?" and the reading one indivisible thing, so
that whoever closes the gate may release the slots: it waits for a copy in memory, never a peer.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.chunk_header import ChunkHeader
from mem_cache.layout import KvPart

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kv_transfer.protocol.lanes import Heads
    from kv_transfer.protocol.region import Region
    from kvferry.ids import SlotIndices
    from mem_cache.kv_pool import KvPool


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    region: Region
    slots: SlotIndices


class OutgoingStream:
    """What one handoff sends on one lane. Used by `SendQueue` alone."""

    def __init__(self, number: int, pool: KvPool, heads: Heads) -> None:
        """`number`: what the sink calls it; `pool` and `heads`: this lane's part of each token."""
        self.number = number
        self.pool = pool
        self.heads = heads
        self.gate = threading.Lock()
        self.is_open = True
        self.unsent_bytes = 0
        """Submitted and not gathered yet. Like the pieces under the queue's lock."""
        self.pieces: deque[_Piece] = deque()

    def part(self, region: Region) -> KvPart:
        """Where a region of this stream lies in the pool."""
        return KvPart(region.layer_start, region.layer_stop, self.heads.start, self.heads.stop)

    def bytes_of(self, region: Region) -> int:
        """Bytes of a region's payload."""
        return self.pool.payload_bytes(region.tokens, self.part(region))


class SendQueue:
    """All streams of one lane, taking turns payload by payload.

    | method | thread |
    |---|---|
    | submit, close_stream | engine |
    | next_chunk, has_work | the lane's |
    | on_work | set once by the lane; called on the engine thread |
    """

    def __init__(self, buffer_bytes: int, *, checksums: bool) -> None:
        """`buffer_bytes`: what fits a staging buffer of either side."""
        self.buffer_bytes = buffer_bytes
        self.on_work: Callable[[], None] = _nobody
        self._checksums = checksums
        self._lock = threading.Lock()
        self._turns: OrderedDict[OutgoingStream, None] = OrderedDict()

    @property
    def has_work(self) -> bool:
        """Whether a piece waits."""
        return bool(self._turns)

    def submit(self, stream: OutgoingStream, region: Region, slots: SlotIndices) -> int:
        """Let a region leave. `slots` (int64 [tokens]) stay unchanged while the gate is open.

        Returns the bytes that it adds to the lane.
        """
        assert len(slots) == region.tokens, f"{len(slots)} slots for {region}"
        assert stream.is_open, f"stream {stream.number} is closed"
        added = stream.bytes_of(region)
        # Not the gate: this thread would wait for a gather that is at work.
        with self._lock:
            stream.unsent_bytes += added
            stream.pieces.append(_Piece(region, slots))
            self._turns.setdefault(stream)
        self.on_work()
        return added

    def close_stream(self, stream: OutgoingStream) -> int:
        """After it returns nothing reads the stream's slots. Returns the bytes that never left."""
        with stream.gate:
            stream.is_open = False
        with self._lock:
            unsent, stream.unsent_bytes = stream.unsent_bytes, 0
            self._turns.pop(stream, None)
            stream.pieces.clear()
        return unsent

    def next_chunk(self, seq: int, out: torch.Tensor) -> ChunkHeader | None:
        """Gather the next payload to the head of `out` (uint8); None if nothing waits."""
        assert out.numel() >= self.buffer_bytes, "a staging buffer is too small"
        while True:
            taken = self._next_piece()
            if taken is None:
                return None
            stream, piece = taken
            with stream.gate:
                if not stream.is_open:
                    continue
                used = stream.pool.gather(piece.slots, stream.part(piece.region), out)
                with self._lock:
                    stream.unsent_bytes -= used
            checksum = zlib.crc32(out[:used].numpy().data) if self._checksums else 0
            return ChunkHeader(
                seq, stream.number, piece.region, used, checksum, is_last=not self.has_work
            )

    def _next_piece(self) -> tuple[OutgoingStream, _Piece] | None:
        with self._lock:
            if not self._turns:
                return None
            stream, _ = self._turns.popitem(last=False)
            piece = stream.pieces.popleft()
            first, rest = piece.region.cut(self._cells_max(stream, piece.region))
            if rest is not None:
                stream.pieces.appendleft(_Piece(rest, piece.slots[first.tokens :]))
            if stream.pieces:
                self._turns[stream] = None
            return stream, _Piece(first, piece.slots[: first.tokens])

    def _cells_max(self, stream: OutgoingStream, region: Region) -> int:
        return self.buffer_bytes * region.cells // stream.bytes_of(region)


def _nobody() -> None:
    """No lane listens yet; it looks for work when it is built."""
