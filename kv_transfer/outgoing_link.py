"""The source's end of one link generation as the engine thread sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.outgoing import OutgoingStream, SendQueue
from kv_transfer.protocol.link import LinkCore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.endpoint import Endpoint
    from kv_transfer.protocol.lanes import Lane
    from kv_transfer.protocol.region import Region
    from kvferry.ids import SlotIndices


class OutgoingLink:
    """The lanes of one generation, and what is under way on all of them."""

    def __init__(
        self,
        generation: int,
        endpoint: Endpoint,
        lanes: Sequence[Lane],
        payload_bytes_max: int,
        now_s: float,
    ) -> None:
        """`payload_bytes_max`: what fits a staging buffer of either side."""
        self.core = LinkCore(generation, endpoint.deadlines, now_s)
        self.queues = tuple(
            SendQueue(payload_bytes_max, checksums=endpoint.config.checksums) for _ in lanes
        )
        self._lanes = tuple(lanes)
        self._pools = endpoint.pools

    def open_streams(self, number: int) -> tuple[OutgoingStream, ...]:
        """One handoff's streams, one per lane. `number` is what the sink calls it."""
        return tuple(
            OutgoingStream(number, self._pools[lane.source_rank], lane.source_heads)
            for lane in self._lanes
        )

    def cells_per_payload(self) -> int:
        """Cells (a token in a layer) that fill a staging buffer on the lane with most heads."""
        layout = self._pools[0].layout
        heads = max(lane.source_heads.stop - lane.source_heads.start for lane in self._lanes)
        cell_bytes = layout.planes * heads * layout.unit_bytes
        return max(1, self.queues[0].buffer_bytes // cell_bytes)

    def submit(
        self, streams: Sequence[OutgoingStream], region: Region, slots: SlotIndices, now_s: float
    ) -> None:
        """Let a region leave on all lanes."""
        for queue, stream in zip(self.queues, streams, strict=True):
            self.core.posted(stream.bytes_of(region), now_s)
            queue.submit(stream, region, slots)

    def close_streams(self, streams: Sequence[OutgoingStream], now_s: float) -> None:
        """After it returns nothing reads the slots of that handoff."""
        for queue, stream in zip(self.queues, streams, strict=True):
            self.core.done(queue.close_stream(stream), now_s)
