"""The source's end of one link generation as the engine thread sees it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kv_transfer.protocol.link import SendingLinkCore
from kv_transfer.protocol.states import LinkState
from kv_transfer.staging import StagingRing

if TYPE_CHECKING:
    import torch

    from kv_transfer.endpoint import Endpoint
    from kv_transfer.link import SendingLink


class OutgoingLink:
    """Credits, staging buffers and the payloads in flight of one generation."""

    def __init__(
        self, generation: int, endpoint: Endpoint, payload_bytes_max: int, now_s: float
    ) -> None:
        self.core = SendingLinkCore(generation, endpoint.deadlines, now_s)
        self.chunk_tokens = payload_bytes_max // endpoint.kv_cache.layout.bytes_per_token
        """Tokens of all layers that fit one staging buffer here and at the sink."""
        self._ring = StagingRing(endpoint.config.staging_buffers, payload_bytes_max)
        self._in_flight: deque[tuple[int, int]] = deque()
        self._link: SendingLink | None = None

    def attach(self, link: SendingLink) -> None:
        """The local end exists."""
        self._link = link

    def credit(self, buffers: int, now_s: float) -> None:
        """The peer has posted receives; the first ones say that the link is up."""
        if self.core.state is LinkState.BUILDING:
            self.core.built(now_s)
        self.core.credit(buffers)

    @property
    def can_send(self) -> bool:
        """Whether there is credit and a staging buffer."""
        return self._link is not None and self.core.can_send and self._ring.free > 0

    def take(self) -> tuple[int, torch.Tensor]:
        """A staging buffer to gather into: its index, and uint8 [buffer bytes]."""
        index = self._ring.take()
        return index, self._ring.buffer(index)

    def post(self, buffer: int, now_s: float) -> int:
        """Use one credit for the payload in `buffer`; its sequence number."""
        seq = self.core.post(now_s)
        self._in_flight.append((seq, buffer))
        return seq

    def send(self, seq: int, payload: torch.Tensor) -> None:
        """Hand a posted payload to the link's thread."""
        assert self._link is not None
        self._link.send(seq, payload)

    def completed(self, seq: int, now_s: float) -> None:
        """The oldest payload has left."""
        expected, buffer = self._in_flight.popleft()
        assert expected == seq, f"payload {seq} left before {expected}"
        self._ring.give_back(buffer)
        self.core.completed(now_s)
