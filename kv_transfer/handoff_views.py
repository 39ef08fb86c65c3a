"""What each side of a handoff shows of it to people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.protocol.states import SINK_RESERVED
from kvferry.handoff_view import HandoffView

if TYPE_CHECKING:
    from kv_transfer.protocol.sink import SinkCore
    from kv_transfer.protocol.source import SourceCore


def source_view(core: SourceCore, age_s: float) -> HandoffView:
    """At the side that computes the prompt."""
    return HandoffView(
        core.key.request_id,
        core.key.attempt,
        core.key.source_incarnation,
        core.key.sink_incarnation,
        is_source=True,
        state=core.state.value,
        age_s=age_s,
        prompt_tokens=core.prompt_tokens,
        computed_tokens=core.computed_tokens,
    )


def sink_view(core: SinkCore, age_s: float, moved_bytes: int, token_bytes: int) -> HandoffView:
    """At the side that decodes; `token_bytes`: of the KV of one token, on all ranks."""
    moving = core.moving_tokens if core.state in SINK_RESERVED else 0
    return HandoffView(
        core.key.request_id,
        core.key.attempt,
        core.key.source_incarnation,
        core.key.sink_incarnation,
        is_source=False,
        state=core.state.value,
        age_s=age_s,
        prompt_tokens=core.prompt_tokens,
        moved_bytes=moved_bytes,
        total_bytes=moving * token_bytes,
    )
