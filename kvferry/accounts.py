"""The five accounts of a worker's KV slots, and its load: what others are told of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvAccounts:
    """Slots of one worker by owner; every slot is in exactly one of the first five."""

    free: int
    evictable: int
    protected: int
    private: int
    inbound: int
    total: int
    outbound_pinned: int
    """A pin, not an account: these slots are counted in protected or private as well."""
    rows_live: int
    rows_total: int

    @property
    def is_conserved(self) -> bool:
        """Whether the five accounts add up to the total."""
        owned = self.free + self.evictable + self.protected + self.private + self.inbound
        return owned == self.total

    @property
    def is_idle(self) -> bool:
        """Whether nothing but unlocked cache is held: the baseline after every request ended."""
        held = self.protected + self.private + self.inbound + self.outbound_pinned
        return self.is_conserved and held == 0 and self.rows_live == 0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker has to do, for the router's cost policy."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    handoffs: int = 0
    prefill_tokens_per_s: float = 0.0
    """0 before the first prompt."""
    link_bytes_per_s: float = 0.0
    """0 before the first handoff."""
