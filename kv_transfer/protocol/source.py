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
    SendComplete,
    Stream,
    Unpin,
)
from kv_transfer.protocol.errors import BadMessage, IllegalEvent
from kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Busy,
    Closed,
    FirstToken,
    Grant,
    Ready,
    Received,
)
from kv_transfer.protocol.region import Region
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
        *,
        layout_hash: str,
        num_layers: int,
        samples: int,
        deadlines: Deadlines,
        now_s: float,
    ) -> None:
        """`samples`: how many first tokens will be chosen; 0 if only what is held is wanted."""
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.samples = samples
        self.state = SourceState.QUEUED
        self.computed_tokens = 0
        self.handed_tokens = 0
        """Tokens [0, handed_tokens) are with the link in all layers, or need not move."""
        self.handed_layers = 0
        """Layers of the tokens after those that are with the link as well."""
        self.stream: int | None = None
        """What the sink calls this handoff's payloads; None before the grant."""
        self.link_generation: int | None = None
        """The generation that carries the payloads; None before the first."""
        self.duplicates = 0
        self._first_tokens: tuple[OutputToken, ...] | None = None
        self._layout_hash = layout_hash
        self._num_layers = num_layers
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

    def held(self, tokens: int, now_s: float) -> Effects:
        """The beginning of the prompt that the cache holds: offer that, and no first token."""
        assert self.samples == 0, f"{self.key}: the sink wants the whole prompt"
        assert 0 < tokens <= self.prompt_tokens, f"{self.key}: {tokens} tokens held"
        self.prompt_tokens = tokens
        effects = self.scheduled(tokens, now_s)
        self._advance(SourceEvent.FINISHED, now_s)
        self.computed_tokens, self._first_tokens = tokens, ()
        return effects

    def computing(self, tokens: int, layers: int, now_s: float) -> Effects:
        """A step is at work: the KV of tokens [0, tokens) is in the pool in layers [0, layers)."""
        assert self.computed_tokens < tokens <= self.prompt_tokens, f"{self.key}: {tokens} tokens"
        assert self.handed_layers <= layers <= self._num_layers, f"{self.key}: {layers} layers"
        if self.state is not SourceState.STREAMING:
            return _NOTHING
        self._advance(SourceEvent.COMPUTED, now_s)
        return self._hand_over(tokens, layers)

    def computed(self, tokens: int, now_s: float) -> Effects:
        """The KV of tokens [0, tokens) is in the pool."""
        assert self.computed_tokens <= tokens <= self.prompt_tokens, (
            f"{self.key}: computed {tokens} of {self.prompt_tokens} after {self.computed_tokens}"
        )
        self._advance(SourceEvent.COMPUTED, now_s)
        self.computed_tokens = tokens
        return self._stream_computed()

    def finished(self, first_tokens: tuple[OutputToken, ...], now_s: float) -> Effects:
        """The whole prompt is computed; these are the first generated tokens, one per sample."""
        assert self._first_tokens is None, f"{self.key}: first tokens twice"
        assert len(first_tokens) == self.samples, f"{self.key}: {len(first_tokens)} first tokens"
        self._advance(SourceEvent.FINISHED, now_s)
        self.computed_tokens = self.prompt_tokens
        self._first_tokens = first_tokens
        if self.state is not SourceState.STREAMING:
            return _NOTHING
        return (*self._tell_first_tokens(), *self._stream_computed(), *self._drain(now_s))

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
                return self._on_grant(message, now_s)
            case Busy():
                return self._on_busy(now_s)
            case Received():
                self._advance(SourceEvent.RECEIVED, now_s)
                return (Unpin(), Send(Closed(self.key)), NotifyClosed())
            case Abort():
                reason = f"the sink aborted: {message.reason}"
                return self._end_and_cancel(SourceEvent.ABORT_RECEIVED, reason, now_s)

    def _on_grant(self, grant: Grant, now_s: float) -> Effects:
        if self._is_duplicate(SourceEvent.GRANT):
            return _NOTHING
        if not 0 <= grant.resume_at <= self.prompt_tokens:
            raise BadMessage(f"{self.key}: cannot resume at {grant.resume_at}")
        self._advance(SourceEvent.GRANT, now_s)
        self.handed_tokens, self.stream = grant.resume_at, grant.stream
        return (*self._tell_first_tokens(), *self._stream_computed(), *self._drain(now_s))

    def _on_busy(self, now_s: float) -> Effects:
        if self._is_duplicate(SourceEvent.BUSY):
            return _NOTHING
        self._advance(SourceEvent.BUSY, now_s)
        self._offer_due_at = now_s + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, REOFFER_MAX_S)
        return _NOTHING

    # --- what link, session and time say ---

    def sent(self, now_s: float) -> Effects:
        """A payload of this handoff has left."""
        if self.state in (SourceState.STREAMING, SourceState.COMPLETED):
            self._advance(SourceEvent.SENT, now_s)
        return _NOTHING

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

    def _tell_first_tokens(self) -> Effects:
        return (Send(FirstToken(self.key, self._first_tokens)),) if self._first_tokens else ()

    def _stream_computed(self) -> Effects:
        """Everything that is computed and not with the link yet."""
        if self.state is not SourceState.STREAMING:
            return _NOTHING
        effects = self._hand_over(self.computed_tokens, self._num_layers)
        self.handed_tokens = max(self.handed_tokens, self.computed_tokens)
        self.handed_layers = 0
        return effects

    def _hand_over(self, tokens: int, layers: int) -> Effects:
        if tokens <= self.handed_tokens or layers == self.handed_layers:
            return _NOTHING
        region = Region(self.handed_tokens, tokens, self.handed_layers, layers)
        self.handed_layers = layers
        return (Stream(region),)

    def _drain(self, now_s: float) -> Effects:
        """Complete as soon as every token and the first tokens have been handed over."""
        if self.state is not SourceState.STREAMING or self._first_tokens is None:
            return _NOTHING
        self._advance(SourceEvent.DRAINED, now_s)
        return (SendComplete(self.prompt_tokens),)

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
