"""The control messages of a session, as values. `kv_transfer.wire` puts them into protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kv_transfer.protocol.key import HandoffKey
    from kvferry.attempt_marks import PromptMarks
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
    heads: int
    """KV heads of the model, on all ranks together."""
    ranks: int = 1
    """Tensor-parallel degree: the heads are split over so many pools."""
    host: str = ""
    """Equal for two workers that can share memory; empty if this one shares none."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """Sink to source: I want the KV of this prompt. The sink holds none yet."""

    key: HandoffKey
    prompt: TokenIds
    sampling: SamplingParams
    cache_use: CacheUse
    layout_hash: str
    held_only: bool = False
    """Send what your cache holds of its beginning; compute nothing, and choose no token."""
    goes_first: bool = False
    """Compute it before the prompts of others."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Source to sink: the prompt is scheduled and its slots are pinned; may I send?"""

    key: HandoffKey
    prompt_tokens: int
    """All of the prompt; of one that is `held_only` as much as is held."""
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
    stream: int
    """What payloads of this handoff bear; never used again in the session."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Sink to source: no slots now; ask again."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Source to sink: the first generated token of each sample, for the client at once."""

    key: HandoffKey
    tokens: tuple[OutputToken, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """Source to sink: everything is with the link."""

    key: HandoffKey
    tokens: int
    """Prompt tokens the sink is to hold, its own prefix included."""
    link_generation: int | None
    """The generation that carries them; None if nothing had to move."""
    marks: PromptMarks | None = None
    """How the source spent its time; decides nothing."""


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
    """Either way: one entry of a lane's rendezvous store, mirrored to the peer."""

    link_generation: int
    lane: int
    store_key: str
    store_value: bytes


class Signal(Enum):
    """What the ends of a lane tell one another through the session, where they have to."""

    CREDIT = "credit"
    """Sink to source: so many more receives are posted."""
    SENDING = "sending"
    """Source to sink: payloads from this sequence number on are on their way."""


@dataclass(frozen=True, slots=True)
class LinkSignal:
    """Either way: what one end of a lane tells the other."""

    link_generation: int
    lane: int
    signal: Signal
    value: int


@dataclass(frozen=True, slots=True)
class LinkDown:
    """Either way: this link generation has ended; its handoffs fail."""

    link_generation: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class KvOffer:
    """Sink to source, outside of any handoff: I hold the KV of these tokens; fetch it if you like.

    Nobody answers it and nobody waits: whoever wants the KV asks with `Prefill`, roles exchanged.
    """

    key: HandoffKey
    """Of the handoff in which it can be fetched: the one that offers is its source."""
    address: str
    """Where the one that offers serves sessions."""
    tokens: TokenIds
    cache_use: CacheUse


ToSource: TypeAlias = Prefill | Grant | Busy | Received
ToSink: TypeAlias = Ready | FirstToken | Complete | Closed
ToEither: TypeAlias = Abort | Aborted
HandoffMessage: TypeAlias = ToSource | ToSink | ToEither
"""Messages that belong to one handoff and carry its key."""

LinkMessage: TypeAlias = LinkRendezvous | LinkSignal | LinkDown
SessionMessage: TypeAlias = Hello | HandoffMessage | LinkMessage | KvOffer
