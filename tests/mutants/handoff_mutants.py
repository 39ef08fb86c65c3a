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
        "Inbound KV is adopted when every cell is in its slots.",
        _SINK,
        "if self.state is not SinkState.SETTLING or self.remaining:",
        "if self.state is not SinkState.SETTLING:",
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
        "kv-of-another-model-accepted",
        "KV that other weights have computed is never taken for ours.",
        "kv_transfer/driver.py",
        "layout.exchange_hash(len(pools), model)",
        "layout.exchange_hash(len(pools))",
        (
            "tests/integration/test_handoff_refusals.py"
            "::test_kv_of_another_model_is_refused_before_anything_moves",
        ),
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
        "completed-before-it-is-computed",
        "A source says that it is complete when the first tokens are chosen, and not before.",
        _SOURCE,
        "if self.state is not SourceState.STREAMING or self._first_tokens is None:",
        "if self.state is not SourceState.STREAMING:",
        _SOURCE_TESTS,
    ),
    Mutant(
        "cells-outside-the-grant-taken",
        "Only what was granted is taken.",
        "kv_transfer/protocol/coverage.py",
        "if not inside or region.layer_stop > self._num_layers:",
        "if region.layer_stop > self._num_layers:",
        ("tests/unit/kv_transfer/test_coverage.py",),
    ),
    Mutant(
        "payload-without-credit-taken",
        "A sink takes as many payloads as it gave credits for.",
        "kv_transfer/protocol/credits.py",
        "if seq >= self.granted:",
        "if False:",
        ("tests/unit/kv_transfer/test_credits.py",),
    ),
    Mutant(
        "more-work-keeps-a-dead-link",
        "What is handed to a link is no progress of it.",
        "kv_transfer/protocol/link.py",
        "(limit.renewed_by_progress and event is not LinkEvent.POSTED)",
        "limit.renewed_by_progress",
        ("tests/unit/kv_transfer/test_link.py",),
    ),
)
