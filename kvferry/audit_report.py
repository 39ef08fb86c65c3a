"""What the ledger checks of one worker found at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.accounts import HostAccounts, KvAccounts


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The outcome of one run of every check."""

    violations: tuple[str, ...]
    """Empty: the ledger is right."""
    accounts: KvAccounts
    duration_ms: float
    """How long the checks kept the engine from its next step."""
    engine_steps: int
    """Steps that the engine had done."""
    host_accounts: HostAccounts | None = None
    """None without a host tier."""
