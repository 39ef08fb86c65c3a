"""The accounts of a worker's KV slots in each tier, and its load: what others are told of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvAccounts:
    """Slots of one worker by owner; every slot is in exactly one account."""

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
    loading: int = 0
    """An account: reserved for KV on its way back from a lower tier."""

    @property
    def is_conserved(self) -> bool:
        """Whether the accounts add up to the total."""
        unlocked, held = self.free + self.evictable, self.protected + self.private + self.inbound
        return unlocked + held + self.loading == self.total

    @property
    def is_idle(self) -> bool:
        """Whether nothing but unlocked cache is held: the baseline after every request ended."""
        held = self.protected + self.private + self.inbound + self.outbound_pinned + self.loading
        return self.is_conserved and held == 0 and self.rows_live == 0


@dataclass(frozen=True, slots=True)
class HostAccounts:
    """Slots of one worker's host tier by owner; every slot is in exactly one account."""

    free: int
    evictable: int
    protected: int
    """In use by a copy: read, or followed by what is being written."""
    writing: int
    """Reserved for KV on its way from the device."""
    loading: int
    """Reserved for KV on its way from files."""
    total: int

    @property
    def is_conserved(self) -> bool:
        """Whether the accounts add up to the total."""
        owned = self.free + self.evictable + self.protected + self.writing + self.loading
        return owned == self.total

    @property
    def is_idle(self) -> bool:
        """Whether nothing but unlocked cache is held: the baseline with no copy in flight."""
        return self.is_conserved and self.protected + self.writing + self.loading == 0


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
