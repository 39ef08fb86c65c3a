"""Whether to fetch KV that a decode worker gives back, or to compute it when it is needed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.config import KvReturn

PREFILL_TOKENS_PER_S = 400.0
"""Until this worker has computed a prompt; a small model on one CPU core."""
LINK_BYTES_PER_S = 1e9
"""Until something has come in; a link between two processes of one machine does more."""
HANDOFF_S = 0.005
"""What a handoff costs however little it moves: five messages, and a link's share of its setup."""
CHANCE_OF_USE = 0.5
"""That a conversation goes on, and here. Fetching is paid in any case, computing only then."""


@dataclass(frozen=True, slots=True)
class ReturnFacts:
    """What an offer would bring and cost. Rates are 0 where nothing was measured yet."""

    missing_tokens: int
    """Offered and not cached here; whole pages."""
    room_tokens: int
    """Slots that are promised to nobody."""
    bytes_per_token: int
    link_bytes_per_s: float
    prefill_tokens_per_s: float


def is_worth_fetching(policy: KvReturn, facts: ReturnFacts) -> bool:
    """Whether the offer is taken. What does not fit is never taken."""
    if policy is KvReturn.NEVER or not 0 < facts.missing_tokens <= facts.room_tokens:
        return False
    if policy is KvReturn.ALWAYS:
        return True
    moved_bytes = facts.missing_tokens * facts.bytes_per_token
    fetch_s = HANDOFF_S + moved_bytes / (facts.link_bytes_per_s or LINK_BYTES_PER_S)
    compute_s = facts.missing_tokens / (facts.prefill_tokens_per_s or PREFILL_TOKENS_PER_S)
    return fetch_s < CHANCE_OF_USE * compute_s
