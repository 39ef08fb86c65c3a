"""Bugs of a handoff: KV that is used too early, or kept for ever."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_SINK = "kv_transfer/protocol/sink.py"
_SINK_TESTS = ("tests/unit/kv_transfer/test_sink.py",)
_SOURCE = "kv_transfer/protocol/source.py"
_SOURCE_TESTS = ("tests/unit/kv_transfer/test_source.py",)

HANDOFF_MUTANTS = (
    Mutant(
        "committed-before-it-is-there",
        "Inbound KV is adopted when every announced payload is in its slots.",
        _SINK,
        "if self.state is not SinkState.SETTLING or self.chunks_scattered < self.chunks_announced:",
        "if self.state is not SinkState.SETTLING:",
        _SINK_TESTS,
    ),
    Mutant(
        "scattered-after-the-end",
        "After a handoff has ended nothing is written to its slots: they may be another's.",
        _SINK,
        "        return self.state in SINK_RESERVED\n",
        "        return True\n",
        _SINK_TESTS,
    ),
    Mutant(
        "foreign-layout-accepted",
        "KV of another layout is never taken for ours.",
        _SINK,
        "if message.layout_hash != self._layout_hash:",
        "if not message.layout_hash:",
        _SINK_TESTS,
    ),
    Mutant(
        "pin-kept-at-the-end",
        "A source lets go of its slots when the sink has the KV.",
        _SOURCE,
        "return (Unpin(), Send(Closed(self.key)), NotifyClosed())",
        "return (Send(Closed(self.key)), NotifyClosed())",
        _SOURCE_TESTS,
    ),
    Mutant(
        "pin-kept-at-an-abort",
        "A source lets go of its slots however the handoff ends.",
        _SOURCE,
        "return (Unpin(), Send(last)) if pinned else (Send(last),)",
        "return (Send(last),)",
        _SOURCE_TESTS,
    ),
    Mutant(
        "unpinned-while-offered",
        "A source keeps its slots from the offer on.",
        _SOURCE,
        "return (Pin(), Send(self._ready()))",
        "return (Send(self._ready()),)",
        _SOURCE_TESTS,
    ),
    Mutant(
        "completed-before-all-has-left",
        "A source says that it is complete when every token has left.",
        _SOURCE,
        "done = self.sent_tokens == self.prompt_tokens and self._first_token is not None",
        "done = self._first_token is not None",
        _SOURCE_TESTS,
    ),
)
