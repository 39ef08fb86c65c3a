"""The sink's side of one handoff: ask, reserve late, receive, commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.protocol.effects import (
    Commit,
    DeliverFirstTokens,
    Effects,
    NotifyAdopted,
    NotifyFailed,
    Reserve,
    Send,
)
from kv_transfer.protocol.errors import BadMessage, IllegalEvent
from kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Busy,
    Complete,
    FirstToken,
    Grant,
    Ready,
    Received,
)
from kv_transfer.protocol.states import (
    SINK_DUPLICATES,
    SINK_TERMINAL,
    SINK_TRANSITIONS,
    SinkEvent,
    SinkState,
)

if TYPE_CHECKING:
    from kv_transfer.protocol.deadlines import Deadlines
    from kv_transfer.protocol.key import HandoffKey
    from kvferry.attempt_marks import PromptMarks
    from kvferry.errors import ErrorKind

_NOTHING: Effects = ()


class SinkCore:
    """State of one handoff at the side that decodes.

    Every method takes the time in seconds, returns the effects in order, and raises
    `IllegalEvent` or `BadMessage` without having changed anything.
    """

    def __init__(
        self,
        key: HandoffKey,
        prompt_tokens: int,
        *,
        layout_hash: str,
        samples: int,
        deadlines: Deadlines,
        now_s: float,
    ) -> None:
        """`samples`: how many first tokens are expected; 0 to take only what the source holds."""
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.samples = samples
        self.state = SinkState.REQUESTED
        self.resume_at = 0
        self.remaining = 0
        """Cells (a token in a layer, on a lane) that are still to be scattered."""
        self.has_received = False
        """Whether anything has been scattered: the link that carried it must last."""
        self.hit_tokens = 0
        """Prompt tokens the source had in its own device memory."""
        self.host_hit_tokens = 0
        """Prompt tokens the source loaded back from a lower tier."""
        self.first_tokens_at: float | None = None
        self.source_marks: PromptMarks | None = None
        """How the source spent its time, by its own account."""
        self.duplicates = 0
        self._layout_hash = layout_hash
        self._deadlines = deadlines.sink
        self._deadline_at = now_s + self._deadlines[SinkState.REQUESTED].timeout_s
        self._busy_until: float | None = None

    @property
    def moving_tokens(self) -> int:
        """Tokens of the prompt that the source has to send; known once there is room."""
        return self.prompt_tokens - self.resume_at

    # --- what the host says ---

    def reserved(self, resume_at: int, stream: int, remaining: int, now_s: float) -> Effects:
        """The host holds a row and slots for the prompt; tokens before `resume_at` are here.

        `stream` is the number of its payloads, `remaining` the cells that they will bring.
        """
        assert 0 <= resume_at <= self.prompt_tokens
        self._advance(SinkEvent.RESERVED, now_s)
        self.resume_at, self.remaining = resume_at, remaining
        return (Send(Grant(self.key, resume_at, stream)),)

    def refused(self, now_s: float) -> Effects:
        """The host has no room now."""
        self._advance(SinkEvent.REFUSED, now_s)
        return (Send(Busy(self.key)),)

    def abort(self, reason: str, now_s: float) -> Effects:
        """This side gives up. The host knows already."""
        self._advance(SinkEvent.ABORT_LOCAL, now_s)
        return (Send(Abort(self.key, reason)),)

    # --- what the source says ---

    def on_message(self, message: Ready | FirstToken | Complete | Abort, now_s: float) -> Effects:
        """A message of the source for this handoff."""
        match message:
            case Ready():
                return self._on_ready(message, now_s)
            case FirstToken():
                return self._on_first_tokens(message, now_s)
            case Complete():
                return self._on_complete(message, now_s)
            case Abort():
                self._advance(SinkEvent.ABORT_RECEIVED, now_s)
                reason = f"the source aborted: {message.reason}"
                return (Send(Aborted(self.key)), NotifyFailed(reason, message.kind))

    def _on_ready(self, message: Ready, now_s: float) -> Effects:
        if self._is_duplicate(SinkEvent.READY):
            return _NOTHING
        if message.layout_hash != self._layout_hash:
            raise BadMessage(
                f"{self.key}: KV layout {message.layout_hash} of the source"
                f" is not ours, {self._layout_hash}"
            )
        offers_part = self.samples == 0 and 0 < message.prompt_tokens <= self.prompt_tokens
        if message.prompt_tokens != self.prompt_tokens and not offers_part:
            raise BadMessage(
                f"{self.key}: the source speaks of {message.prompt_tokens} prompt tokens,"
                f" not of {self.prompt_tokens}"
            )
        hits = message.hit_tokens + message.host_hit_tokens
        if hits > message.prompt_tokens:
            raise BadMessage(f"{self.key}: a hit of {hits} tokens exceeds the prompt")
        self._advance(SinkEvent.READY, now_s)
        self.prompt_tokens = message.prompt_tokens
        self.hit_tokens = message.hit_tokens
        self.host_hit_tokens = message.host_hit_tokens
        return (Reserve(self.prompt_tokens),)

    def _on_first_tokens(self, message: FirstToken, now_s: float) -> Effects:
        if self.first_tokens_at is not None and self._is_duplicate(SinkEvent.FIRST_TOKEN_AGAIN):
            return _NOTHING
        if len(message.tokens) != self.samples:
            raise BadMessage(
                f"{self.key}: {len(message.tokens)} first tokens for {self.samples} samples"
            )
        self._advance(SinkEvent.FIRST_TOKEN, now_s)
        self.first_tokens_at = now_s
        return (DeliverFirstTokens(message.tokens),)

    def _on_complete(self, message: Complete, now_s: float) -> Effects:
        if self._is_duplicate(SinkEvent.COMPLETE):
            return _NOTHING
        has_tokens = self.samples == 0 or self.first_tokens_at is not None
        if message.tokens != self.prompt_tokens or not has_tokens:
            raise BadMessage(
                f"{self.key}: complete with {message.tokens} tokens of {self.prompt_tokens},"
                f" first tokens here: {has_tokens}"
            )
        if message.link_generation is None and self.remaining:
            raise BadMessage(f"{self.key}: complete, and no link carries what is missing")
        self._advance(SinkEvent.COMPLETE, now_s)
        self.source_marks = message.marks
        return self._settle(now_s)

    # --- what link, session and time say ---

    def scattered(self, remaining: int, now_s: float) -> Effects:
        """A payload is in the inbound slots; `remaining` cells are still to come."""
        assert 0 <= remaining <= self.remaining, f"{self.key}: {remaining} of {self.remaining} left"
        self._advance(SinkEvent.SCATTERED, now_s)
        self.remaining, self.has_received = remaining, True
        return self._settle(now_s)

    def reject(self, reason: str, now_s: float, kind: ErrorKind | None = None) -> Effects:
        """What the source sent cannot be used: end, tell it, and tell the host."""
        self._advance(SinkEvent.ABORT_LOCAL, now_s)
        return (Send(Abort(self.key, reason)), NotifyFailed(reason, kind))

    def link_lost(self, reason: str, now_s: float) -> Effects:
        """The link generation that carries this handoff has ended."""
        self._advance(SinkEvent.LINK_LOST, now_s)
        text = f"link lost: {reason}"
        return (Send(Abort(self.key, text)), NotifyFailed(text))

    def session_lost(self, reason: str, now_s: float) -> Effects:
        """The session is gone; nothing can be sent to the source any more."""
        self._advance(SinkEvent.SESSION_LOST, now_s)
        return (NotifyFailed(f"session lost: {reason}"),)

    def on_time(self, now_s: float) -> Effects:
        """End at the state's deadline."""
        if self.state in SINK_TERMINAL or now_s < self._deadline_at:
            return _NOTHING
        limit = self._deadlines[self.state]
        reason = f"deadline in state {self.state.value}; waited for {limit.owner.value}"
        self._advance(SinkEvent.DEADLINE, now_s)
        return (Send(Abort(self.key, reason)), NotifyFailed(reason))

    @property
    def wakes_at(self) -> float | None:
        """When `on_time` has to be called next; None once ended."""
        return None if self.state in SINK_TERMINAL else self._deadline_at

    # --- inside ---

    def _settle(self, now_s: float) -> Effects:
        """Commit as soon as all that was granted is scattered. Never before."""
        if self.state is not SinkState.SETTLING or self.remaining:
            return _NOTHING
        self._advance(SinkEvent.SETTLED, now_s)
        return (Commit(self.prompt_tokens), Send(Received(self.key)), NotifyAdopted())

    def _is_duplicate(self, event: SinkEvent) -> bool:
        if (self.state, event) not in SINK_DUPLICATES:
            return False
        self.duplicates += 1
        return True

    def _advance(self, event: SinkEvent, now_s: float) -> None:
        target = SINK_TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalEvent(f"sink of {self.key}", self.state.value, event.value)
        entered = target is not self.state
        self.state = target
        if target in SINK_TERMINAL:
            return
        limit = self._deadlines[target]
        if entered or limit.renewed_by_progress:
            self._deadline_at = now_s + limit.timeout_s
        if target is SinkState.WAITING:
            # One window bounds all refusals of a handoff.
            self._busy_until = self._busy_until or self._deadline_at
            self._deadline_at = self._busy_until
