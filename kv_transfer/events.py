"""What loop and link threads tell the engine thread, through `post`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kv_transfer.link import ReceivingLink, SendingLink
    from kv_transfer.protocol.messages import Hello, SessionMessage
    from kv_transfer.session import Session


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
class SenderBuilt:
    """The source's end of a link generation exists."""

    session: Session
    generation: int
    link: SendingLink


@dataclass(frozen=True, slots=True, eq=False)
class PayloadSent:
    """A payload has left its staging buffer."""

    session: Session
    generation: int
    seq: int


@dataclass(frozen=True, slots=True, eq=False)
class ReceiverBuilt:
    """The sink's end of a link generation exists, with a receive posted in `buffers` buffers."""

    session: Session
    generation: int
    link: ReceivingLink


@dataclass(frozen=True, slots=True, eq=False)
class ReceivesPosted:
    """So many credits have been sent to the peer."""

    session: Session
    generation: int
    buffers: int


@dataclass(frozen=True, slots=True, eq=False)
class PayloadArrived:
    """A payload is in a staging buffer, which is to be recycled."""

    session: Session
    generation: int
    seq: int
    buffer: int
    payload: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LinkFailed:
    """The last event of a link generation."""

    session: Session
    generation: int
    reason: str
