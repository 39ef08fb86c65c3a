"""A copier whose copies run, fail and end when a test says so, in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mem_cache.copier import CopyEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from mem_cache.copier import Copy


class ManualCopier:
    """Runs nothing by itself. `finish` runs a copy at once, as the real one would."""

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = lambda: None
        self.pending: list[Copy] = []
        self.done: list[CopyEnd] = []
        self.finish_fails: Exception | None = None
        """What copies fail with that are finished by the engine's thread."""
        self.is_closed = False

    def submit(self, copy: Copy) -> None:
        self.pending.append(copy)

    def take_done(self) -> list[CopyEnd]:
        taken, self.done = self.done, []
        return taken

    def finish(self, copy: Copy) -> Exception | None:
        for end in self.done:
            if end.copy is copy:
                self.done.remove(end)
                return end.error
        self.pending.remove(copy)
        return self.finish_fails if self.finish_fails is not None else copy.run()

    def cancel(self, copy: Copy) -> None:
        copy.is_cancelled = True
        self.done = [end for end in self.done if end.copy is not copy]
        self.pending = [other for other in self.pending if other is not copy]

    def close(self) -> None:
        self.is_closed = True

    # --- what a test decides ----------------------------------------------------------------

    def run(self, index: int = 0, error: Exception | None = None) -> None:
        """One copy ends: it has copied, or failed with `error` and copied nothing."""
        copy = self.pending.pop(index)
        self.done.append(CopyEnd(copy, error if error is not None else copy.run()))
        self.on_done()

    def run_all(self) -> None:
        """All copies end, in order."""
        while self.pending:
            self.run()
