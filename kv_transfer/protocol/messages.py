"""The control messages of a session, as values. `kv_transfer.wire` puts them into protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kv_transfer.protocol.key import HandoffKey
    from kvferry.cache_key import CacheUse
    from kvferry.errors import ErrorKind
    from kvferry.generation import OutputToken
    from kvferry.ids import Incarnation, TokenIds, WorkerId
    from kvferry.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Hello:
    """First message in each direction: who speaks, and how its KV is laid out."""

    worker_id: WorkerId
    incarnation: Incarnation
    layout_hash: str
    staging_buffer_bytes: int
    """Size of each buffer in which the speaker receives payloads."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """Sink to source: compute this prompt for me. The sink holds no KV yet."""

    key: HandoffKey
    prompt: TokenIds
    sampling: SamplingParams
    cache_use: CacheUse
    layout_hash: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Source to sink: the prompt is scheduled and its slots are pinned; may I send?"""

    key: HandoffKey
    prompt_tokens: int
    layout_hash: str
    hit_tokens: int
    """Prompt tokens that the source had in its own device memory."""
    host_hit_tokens: int = 0
    """Prompt tokens that the source loaded back from a lower tier."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Sink to source: slots are reserved; send the tokens from `resume_at` on."""

    key: HandoffKey
    resume_at: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Sink to source: no slots now; ask again."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Chunk:
    """Source to sink: header of the payload that is next on the link."""

    key: HandoffKey
    link_generation: int
    link_seq: int
    token_start: int
    token_stop: int
    layer_start: int
    layer_stop: int
    payload_bytes: int
    checksum: int
    """CRC-32 of the payload; 0 when checksums are off."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Source to sink: the first generated token, for the client at once."""

    key: HandoffKey
    token: OutputToken


@dataclass(frozen=True, slots=True)
class Complete:
    """Source to sink: everything has been sent; these are the counts to agree on."""

    key: HandoffKey
    tokens: int
    """Prompt tokens the sink must now hold, its own prefix included."""
    chunks: int


@dataclass(frozen=True, slots=True)
class Received:
    """Sink to source: committed. The sink no longer needs the source's slots."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Closed:
    """Source to sink: the pin has ended. The last message of a handoff that succeeded."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Abort:
    """Either way, in any state: I have ended this handoff. Nobody waits for the answer."""

    key: HandoffKey
    reason: str
    kind: ErrorKind | None = None
    """What the request's owner has to know of it; None for a failure that may be tried again."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The answer to `Abort`."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class LinkRendezvous:
    """Either way: one entry of the link's rendezvous store, mirrored to the peer."""

    link_generation: int
    store_key: str
    store_value: bytes


@dataclass(frozen=True, slots=True)
class Credit:
    """Sink to source: so many more staging buffers have a receive posted."""

    link_generation: int
    buffers: int


@dataclass(frozen=True, slots=True)
class LinkDown:
    """Either way: this link generation has ended; its handoffs fail."""

    link_generation: int
    reason: str


ToSource: TypeAlias = Prefill | Grant | Busy | Received
ToSink: TypeAlias = Ready | Chunk | FirstToken | Complete | Closed
ToEither: TypeAlias = Abort | Aborted
HandoffMessage: TypeAlias = ToSource | ToSink | ToEither
"""Messages that belong to one handoff and carry its key."""

LinkMessage: TypeAlias = LinkRendezvous | Credit | LinkDown
SessionMessage: TypeAlias = Hello | HandoffMessage | LinkMessage
