"""What a core asks its driver to do. The driver performs a list of effects in its order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kv_transfer.protocol.messages import HandoffMessage
    from kv_transfer.protocol.region import Region
    from kvferry.errors import ErrorKind
    from kvferry.generation import OutputToken


@dataclass(frozen=True, slots=True)
class Send:
    """Put the message on the session."""

    message: HandoffMessage


@dataclass(frozen=True, slots=True)
class Pin:
    """The request's slots may be read by the handoff from now on."""


@dataclass(frozen=True, slots=True)
class Unpin:
    """The handoff will not read the request's slots again."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Hand a piece of the prompt's KV to the link; it leaves when there is credit."""

    region: Region


@dataclass(frozen=True, slots=True)
class SendComplete:
    """Tell the sink that everything is with the link, and with which generation of it."""

    tokens: int


@dataclass(frozen=True, slots=True)
class NotifyClosed:
    """The sink has the KV; the source's host may release."""


@dataclass(frozen=True, slots=True)
class NotifyCancelled:
    """Ended from outside; the source's host stops computing and releases."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask the sink's host for a row and slots, and report `reserved` or `refused`."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class DeliverFirstTokens:
    """Stream the tokens, one per sample, to the client."""

    tokens: tuple[OutputToken, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Every payload is scattered: the KV becomes readable, inbound becomes private."""

    tokens: int


@dataclass(frozen=True, slots=True)
class NotifyAdopted:
    """The sink's host runs the request."""


@dataclass(frozen=True, slots=True)
class NotifyFailed:
    """The sink's host releases what was reserved."""

    reason: str
    kind: ErrorKind | None = None
    """None for a failure that may be tried again."""


Effect: TypeAlias = (
    Send
    | Pin
    | Unpin
    | Stream
    | SendComplete
    | NotifyClosed
    | NotifyCancelled
    | Reserve
    | DeliverFirstTokens
    | Commit
    | NotifyAdopted
    | NotifyFailed
)
Effects: TypeAlias = tuple[Effect, ...]
