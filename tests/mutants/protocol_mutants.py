"""Bugs of the protocol and of those who perform it, each of which the simulator has to find."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_SIMULATION = ("tests/simulation/test_seeded_runs.py",)
_SOURCE = "kv_transfer/protocol/source.py"
_SINK = "kv_transfer/protocol/sink.py"
_STATES = "kv_transfer/protocol/states.py"
_SOURCE_SIDE = "kv_transfer/source_side.py"
_SINK_SIDE = "kv_transfer/sink_side.py"
_INCOMING = "kv_transfer/incoming.py"
_OUTGOING = "kv_transfer/outgoing.py"
_LINKS = "kv_transfer/session_links.py"

PROTOCOL_MUTANTS = (
    Mutant(
        "released-before-the-gate-is-closed",
        "A source lets go of its slots when no thread can read them any more.",
        _SOURCE_SIDE,
        "            self._close_streams(handoff)\n            self._tombstones.bury",
        "            self._tombstones.bury",
        _SIMULATION,
    ),
    Mutant(
        "read-through-a-closed-gate",
        "A piece that was chosen is read only if its handoff is still live at that moment.",
        _OUTGOING,
        "                if not stream.is_open:\n                    continue",
        "                if False:\n                    continue",
        _SIMULATION,
    ),
    Mutant(
        "written-through-a-closed-gate",
        "A payload is written only if its handoff is live at the moment of the writing.",
        _INCOMING,
        "            if not stream.is_open:\n",
        "            if False:\n",
        _SIMULATION,
    ),
    Mutant(
        "stream-never-forgotten",
        "A handoff that has ended takes no more payloads.",
        _SINK_SIDE,
        "            handoff.peer.session.desk.forget(stream)\n",
        "",
        _SIMULATION,
    ),
    Mutant(
        "adopted-before-it-is-there",
        "Inbound KV is adopted when every cell is in its slots.",
        _SINK,
        "if self.state is not SinkState.SETTLING or self.remaining:",
        "if self.state is not SinkState.SETTLING:",
        _SIMULATION,
    ),
    Mutant(
        "no-tombstone-for-a-prompt",
        "A prompt that has been served, or refused, does not begin again.",
        _SOURCE_SIDE,
        "if known is not None or key in self._tombstones:",
        "if known is not None:",
        _SIMULATION,
    ),
    Mutant(
        "credit-counted-twice",
        "A source sends as many payloads as the sink has posted receives.",
        "kv_transfer/protocol/credits.py",
        "        self.credits += buffers\n",
        "        self.credits += 2 * buffers\n",
        _SIMULATION,
    ),
    Mutant(
        "what-the-sink-has-is-sent",
        "Tokens before `resume_at` do not move.",
        _SOURCE,
        "self.handed_tokens, self.stream = grant.resume_at, grant.stream",
        "self.handed_tokens, self.stream = 0, grant.stream",
        _SIMULATION,
    ),
    Mutant(
        "cells-counted-without-a-look",
        "Each cell is counted once.",
        _INCOMING,
        "    target.coverage.check(header.region)\n",
        "",
        _SIMULATION,
    ),
    Mutant(
        "unpinned-at-the-grant",
        "A source keeps its slots until the sink has the KV.",
        _SOURCE,
        "        self._advance(SourceEvent.GRANT, now_s)\n"
        "        self.handed_tokens, self.stream = grant.resume_at, grant.stream\n"
        "        return (*self._tell",
        "        self._advance(SourceEvent.GRANT, now_s)\n"
        "        self.handed_tokens, self.stream = grant.resume_at, grant.stream\n"
        "        return (Unpin(), *self._tell",
        _SIMULATION,
    ),
    Mutant(
        "received-believed-too-early",
        "A source that has not sent everything does not believe that the sink has it.",
        _STATES,
        "    (_S.STREAMING, _SE.SENT): _S.STREAMING,\n",
        "    (_S.STREAMING, _SE.SENT): _S.STREAMING,\n"
        "    (_S.STREAMING, _SE.RECEIVED): _S.CLOSED,\n",
        _SIMULATION,
    ),
    Mutant(
        "layers-sent-twice",
        "Layers that have left while a step was at work do not leave again after it.",
        _SOURCE,
        "        self.handed_layers = layers\n",
        "",
        _SIMULATION,
    ),
    Mutant(
        "stream-number-used-again",
        "The number of a stream is never another's in the same session.",
        _SINK_SIDE,
        "IncomingStream(next(peer.numbers), ",
        "IncomingStream(len(peer.receiving) + 1, ",
        _SIMULATION,
    ),
    Mutant(
        "link-loss-taken-for-success",
        "Whether the last payloads arrived before the link ended is the sink's to say.",
        _SOURCE,
        "            self._advance(SourceEvent.LINK_LOST, now_s)\n            return _NOTHING\n",
        "            self._advance(SourceEvent.RECEIVED, now_s)\n"
        "            return (Unpin(), NotifyClosed())\n",
        _SIMULATION,
    ),
    Mutant(
        "pin-left-behind-by-an-abort",
        "A source lets go of its slots however the handoff ends.",
        _SOURCE,
        "return (Unpin(), Send(last)) if pinned else (Send(last),)",
        "return (Send(last),)",
        _SIMULATION,
    ),
    Mutant(
        "announced-after-it-is-used",
        "A sink hears of a link generation before it hears what the generation carries.",
        _LINKS,
        "self._session.send_at_once(begin)",
        "self._session.send(begin)",
        _SIMULATION,
    ),
    Mutant(
        "link-opened-on-a-lost-session",
        "No link thread waits for a peer whose session is lost.",
        _LINKS,
        "        if self._is_over:\n            return\n",
        "",
        _SIMULATION,
    ),
    Mutant(
        "first-tokens-told-twice",
        "The client gets the first tokens once.",
        _SINK,
        "if self.first_tokens_at is not None and self._is_duplicate(SinkEvent.FIRST_TOKEN_AGAIN):",
        "if False:",
        _SIMULATION,
    ),
    Mutant(
        "lost-session-leaves-its-handoffs",
        "A sink ends what it has with a source whose session is lost.",
        _SINK_SIDE,
        "                self._perform(handoff, handoff.core.session_lost(reason, now))\n",
        "                pass\n",
        _SIMULATION,
    ),
)
