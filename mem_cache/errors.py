"""The two ways of running out of memory, and the one way of being wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import ErrorKind, KvferryError

if TYPE_CHECKING:
    from collections.abc import Sequence


class OutOfRows(KvferryError):
    """No free request row. More KV memory would not help; `cache.rows` would."""

    kind = ErrorKind.OVERLOADED

    def __init__(self, needed: int, report: str) -> None:
        super().__init__(f"no free request row ({needed} needed)\n{report}")
        self.needed = needed
        self.report = report


class OutOfSlots(KvferryError):
    """Too few free and evictable slots for the next tokens of a request that has its row."""

    kind = ErrorKind.OVERLOADED

    def __init__(self, needed: int, supply: int, report: str) -> None:
        super().__init__(f"{needed} KV slots needed, {supply} free or evictable\n{report}")
        self.needed = needed
        self.supply = supply
        self.report = report


class LedgerError(AssertionError):
    """The accounts contradict one another: a bug of ours. Lists every violation found."""

    def __init__(self, violations: Sequence[str]) -> None:
        super().__init__("\n".join(violations))
        self.violations = tuple(violations)
