"""The configurations that members of a cluster run under, by revision."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvferry.config import ClusterConfig


class Configurations:
    """The current one, and older ones for as long as somebody runs under them."""

    def __init__(self, by_revision: Mapping[int, ClusterConfig], revision: int) -> None:
        self._by_revision = dict(by_revision)
        self.revision = revision
        """The current one."""
        assert revision in self._by_revision, f"no configuration of revision {revision}"

    @property
    def current(self) -> ClusterConfig:
        """What members are made of now."""
        return self._by_revision[self.revision]

    @property
    def by_revision(self) -> Mapping[int, ClusterConfig]:
        """For the record."""
        return MappingProxyType(self._by_revision)

    def of(self, revision: int) -> ClusterConfig:
        """What a member of this revision runs under."""
        return self._by_revision[revision]

    def add(self, config: ClusterConfig) -> int:
        """Make it the current one. Returns its revision."""
        self.revision = max(self._by_revision) + 1
        self._by_revision[self.revision] = config
        return self.revision

    def go_back(self, revision: int) -> None:
        """Make an older one the current one again."""
        assert revision in self._by_revision, f"revision {revision} is forgotten"
        self.revision = revision

    def keep_only(self, used: Iterable[int]) -> None:
        """Forget those of no member, but for the current one."""
        kept = {*used, self.revision}
        self._by_revision = {
            number: each for number, each in self._by_revision.items() if number in kept
        }
