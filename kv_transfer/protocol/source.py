"""The source's side of one handoff: offer, stream, complete, close."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.protocol.deadlines import REOFFER_FIRST_S, REOFFER_MAX_S
from kv_transfer.protocol.effects import (
    Effect,
    Effects,
    NotifyCancelled,
    NotifyClosed,
    Pin,
    Send,
    SendPayload,
    Unpin,
    WantCredit,
)
from kv_transfer.protocol.errors import BadMessage, IllegalEvent
from kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Busy,
    Closed,
    Complete,
    FirstToken,
    Grant,
    Ready,
    Received,
)
from kv_transfer.protocol.states import (
    SOURCE_DUPLICATES,
    SOURCE_PINNED,
    SOURCE_TERMINAL,
    SOURCE_TRANSITIONS,
    SourceEvent,
    SourceState,
)

if TYPE_CHECKING:
    from kv_transfer.protocol.deadlines import Deadlines
    from kv_transfer.protocol.key import HandoffKey
    from kvferry.errors import ErrorKind
    from kvferry.generation import OutputToken

_NOTHING: Effects = ()


class SourceCore:
    """State of one handoff at the side that computes the prompt.

    Every method takes the time in seconds, returns the effects in order, and raises
    `IllegalEvent` or `BadMessage` without having changed anything.
    """

    def __init__(
        self,
        key: HandoffKey,
        prompt_tokens: int,
        layout_hash: str,
        page_size: int,
        deadlines: Deadlines,
        now_s: float,
    ) -> None:
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.state = SourceState.QUEUED
        self.computed_tokens = 0
        self.sent_tokens: int | None = None
        """Tokens [0, sent_tokens) have left or need not; None before the grant."""
        self.chunks_sent = 0
        self.link_generation: int | None = None
        """The generation that carries the chunks; None before the first."""
        self.duplicates = 0
        self._first_token: OutputToken | None = None
        self._layout_hash = layout_hash
        self._page_size = page_size
        self._hit_tokens = 0
        self._host_hit_tokens = 0
        self._deadlines = deadlines.source
        self._deadline_at = now_s + self._deadlines[SourceState.QUEUED].timeout_s
        self._offer_due_at: float | None = None
        self._backoff_s = REOFFER_FIRST_S

    # --- what the host says ---

    def scheduled(self, hit_tokens: int, now_s: float, host_hit_tokens: int = 0) -> Effects:
        """The prompt has a row and slots: offer it, and keep the slots from now on."""
        self._advance(SourceEvent.SCHEDULED, now_s)
        self._hit_tokens, self._host_hit_tokens = hit_tokens, host_hit_tokens
        return (Pin(), Send(self._ready()))

    def computed(self, tokens: int, now_s: float) -> Effects:
        """The KV of tokens [0, tokens) is in the pool."""
        assert self.computed_tokens <= tokens <= self.prompt_tokens, (
            f"{self.key}: computed {tokens} of {self.prompt_tokens} after {self.computed_tokens}"
        )
        self._advance(SourceEvent.COMPUTED, now_s)
        self.computed_tokens = tokens
        return self._want_credit()

    def finished(self, first_token: OutputToken, now_s: float) -> Effects:
        """The whole prompt is computed and this is the first generated token."""
        assert self._first_token is None, f"{self.key}: a second first token"
        self._advance(SourceEvent.FINISHED, now_s)
        self.computed_tokens = self.prompt_tokens
        self._first_token = first_token
        if self.state is not SourceState.STREAMING:
            return _NOTHING
        return (Send(FirstToken(self.key, first_token)), *self._want_credit(), *self._drain(now_s))

    def abort(self, reason: str, now_s: float, kind: ErrorKind | None = None) -> Effects:
        """This side gives up. The host knows already."""
        return self._end(SourceEvent.ABORT_LOCAL, Abort(self.key, reason, kind), now_s)

    def protocol_error(self, reason: str, now_s: float) -> Effects:
        """What the sink sent is wrong: end, tell it, and tell the host."""
        return self._end_and_cancel(SourceEvent.ABORT_LOCAL, reason, now_s)

    # --- what the sink says ---

    def on_message(self, message: Grant | Busy | Received | Abort, now_s: float) -> Effects:
        """A message of the sink for this handoff."""
        match message:
            case Grant():
                return self._on_grant(message.resume_at, now_s)
            case Busy():
                return self._on_busy(now_s)
            case Received():
                self._advance(SourceEvent.RECEIVED, now_s)
                return (Unpin(), Send(Closed(self.key)), NotifyClosed())
            case Abort():
                reason = f"the sink aborted: {message.reason}"
                return self._end_and_cancel(SourceEvent.ABORT_RECEIVED, reason, now_s)

    def _on_grant(self, resume_at: int, now_s: float) -> Effects:
        if self._is_duplicate(SourceEvent.GRANT):
            return _NOTHING
        if not 0 <= resume_at <= self.prompt_tokens or resume_at % self._page_size:
            raise BadMessage(f"{self.key}: cannot resume at {resume_at}")
        self._advance(SourceEvent.GRANT, now_s)
        self.sent_tokens = resume_at
        first = self._first_token
        sent: Effects = () if first is None else (Send(FirstToken(self.key, first)),)
        return (*sent, *self._want_credit(), *self._drain(now_s))

    def _on_busy(self, now_s: float) -> Effects:
        if self._is_duplicate(SourceEvent.BUSY):
            return _NOTHING
        self._advance(SourceEvent.BUSY, now_s)
        self._offer_due_at = now_s + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, REOFFER_MAX_S)
        return _NOTHING

    # --- what link, session and time say ---

    @property
    def sendable_tokens(self) -> int:
        """Computed tokens that are granted and have not left."""
        if self.state is not SourceState.STREAMING or self.sent_tokens is None:
            return 0
        return max(0, self.computed_tokens - self.sent_tokens)

    def take_chunk(self, tokens_max: int, link_generation: int, now_s: float) -> Effects:
        """The link has credit and a buffer of `tokens_max` tokens for this handoff."""
        assert tokens_max > 0
        assert self.sendable_tokens > 0, f"{self.key}: nothing to send"
        assert self.link_generation in (None, link_generation), f"{self.key}: link changed"
        self._advance(SourceEvent.CHUNK_TAKEN, now_s)
        assert self.sent_tokens is not None
        start = self.sent_tokens
        stop = min(self.computed_tokens, start + tokens_max)
        self.sent_tokens = stop
        self.chunks_sent += 1
        self.link_generation = link_generation
        return (SendPayload(start, stop), *self._want_credit(), *self._drain(now_s))

    def link_lost(self, reason: str, now_s: float) -> Effects:
        """The link generation that carries this handoff has ended."""
        if self.state is SourceState.COMPLETED:
            self._advance(SourceEvent.LINK_LOST, now_s)
            return _NOTHING
        return self._end_and_cancel(SourceEvent.LINK_LOST, f"link lost: {reason}", now_s)

    def session_lost(self, reason: str, now_s: float) -> Effects:
        """The session is gone; nothing can be sent to the sink any more."""
        if self.state is SourceState.COMPLETED:
            self._advance(SourceEvent.SESSION_LOST, now_s)
            return (Unpin(), NotifyClosed())
        pinned = self.state in SOURCE_PINNED
        self._advance(SourceEvent.SESSION_LOST, now_s)
        unpin: tuple[Effect, ...] = (Unpin(),) if pinned else ()
        return (*unpin, NotifyCancelled(f"session lost: {reason}"))

    def on_time(self, now_s: float) -> Effects:
        """Do what is due: repeat the offer, or end at the state's deadline."""
        if self.state in SOURCE_TERMINAL:
            return _NOTHING
        if now_s >= self._deadline_at:
            limit = self._deadlines[self.state]
            reason = f"deadline in state {self.state.value}; waited for {limit.owner.value}"
            return self._end_and_cancel(SourceEvent.DEADLINE, reason, now_s)
        if self._offer_due_at is not None and now_s >= self._offer_due_at:
            self._advance(SourceEvent.OFFER_DUE, now_s)
            self._offer_due_at = None
            return (Send(self._ready()),)
        return _NOTHING

    @property
    def wakes_at(self) -> float | None:
        """When `on_time` has to be called next; None once ended."""
        if self.state in SOURCE_TERMINAL:
            return None
        if self._offer_due_at is None:
            return self._deadline_at
        return min(self._deadline_at, self._offer_due_at)

    # --- inside ---

    def _ready(self) -> Ready:
        hits = self._hit_tokens, self._host_hit_tokens
        return Ready(self.key, self.prompt_tokens, self._layout_hash, *hits)

    def _want_credit(self) -> Effects:
        return (WantCredit(),) if self.sendable_tokens else ()

    def _drain(self, now_s: float) -> Effects:
        """Complete as soon as every token and the first token have left."""
        done = self.sent_tokens == self.prompt_tokens and self._first_token is not None
        if self.state is not SourceState.STREAMING or not done:
            return _NOTHING
        self._advance(SourceEvent.DRAINED, now_s)
        return (Send(Complete(self.key, self.prompt_tokens, self.chunks_sent)),)

    def _end_and_cancel(self, event: SourceEvent, reason: str, now_s: float) -> Effects:
        answers = event is SourceEvent.ABORT_RECEIVED
        last = Aborted(self.key) if answers else Abort(self.key, reason)
        return (*self._end(event, last, now_s), NotifyCancelled(reason))

    def _end(self, event: SourceEvent, last: Abort | Aborted, now_s: float) -> Effects:
        pinned = self.state in SOURCE_PINNED
        self._advance(event, now_s)
        return (Unpin(), Send(last)) if pinned else (Send(last),)

    def _is_duplicate(self, event: SourceEvent) -> bool:
        if (self.state, event) not in SOURCE_DUPLICATES:
            return False
        self.duplicates += 1
        return True

    def _advance(self, event: SourceEvent, now_s: float) -> None:
        target = SOURCE_TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalEvent(f"source of {self.key}", self.state.value, event.value)
        entered = target is not self.state
        offered_again = entered and {self.state, target} == _OFFER_STATES
        self.state = target
        if target in SOURCE_TERMINAL:
            self._offer_due_at = None
            return
        limit = self._deadlines[target]
        if (entered and not offered_again) or limit.renewed_by_progress:
            self._deadline_at = now_s + limit.timeout_s
        if target is SourceState.STREAMING:
            self._offer_due_at = None


_OFFER_STATES = {SourceState.OFFERED, SourceState.DEFERRED}
"""One window bounds an offer and all its repetitions."""
