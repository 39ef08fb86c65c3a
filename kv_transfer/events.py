"""What loop and link threads tell the engine thread, through `post`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.incoming import TakenChunk
    from kv_transfer.protocol.messages import Hello, SessionMessage
    from kv_transfer.session import Session
    from kvferry.handoff_view import HandoffView


@dataclass(frozen=True, slots=True, eq=False)
class SessionOpened:
    """Both sides have greeted."""

    session: Session
    peer: Hello


@dataclass(frozen=True, slots=True, eq=False)
class MessageCame:
    """A message of the peer, in order."""

    session: Session
    message: SessionMessage


@dataclass(frozen=True, slots=True, eq=False)
class SessionLost:
    """The last event of a session, whether it was ever open or not."""

    session: Session
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class LinkBuilt:
    """Every lane of a link generation exists at this end."""

    session: Session
    generation: int


@dataclass(frozen=True, slots=True, eq=False)
class PayloadSent:
    """A payload of the source has left its staging buffer."""

    session: Session
    generation: int
    stream: int
    payload_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTaken:
    """The sink's desk has dealt with a payload at `taken_at_s`."""

    session: Session
    generation: int
    taken: TakenChunk
    taken_at_s: float


@dataclass(frozen=True, slots=True, eq=False)
class LinkFailed:
    """The last event of a link generation."""

    session: Session
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class ShowHandoffs:
    """Somebody looks. `deliver` is called on the engine thread, once, unless the engine ends
    before it comes to this; it must not block."""

    deliver: Callable[[tuple[HandoffView, ...]], None]
