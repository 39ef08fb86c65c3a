"""An attempt's stream that keeps what was said, and checks that it ends exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import KvferryError

if TYPE_CHECKING:
    from kvferry.generation import AttemptOutput


class AttemptLog:
    """An `AttemptStream`."""

    def __init__(self, samples: int) -> None:
        """`samples`: how many are to finish."""
        self._samples = samples
        self._items: list[AttemptOutput | KvferryError] = []

    def deliver(self, item: AttemptOutput | KvferryError) -> None:
        self._items.append(item)

    def outputs(self) -> tuple[list[AttemptOutput], KvferryError | None]:
        """All of them, and the error that ended the attempt, if one did."""
        *before, last = self._items
        assert not any(isinstance(item, KvferryError) for item in before), "said after its end"
        outputs = [item for item in self._items if not isinstance(item, KvferryError)]
        finished = [output.sample for output in outputs if output.finish is not None]
        assert len(finished) == len(set(finished)) <= self._samples
        if isinstance(last, KvferryError):
            assert len(finished) < self._samples, "an error after the last finish"
            return outputs, last
        assert last.finish is not None, "no end"
        assert len(finished) == self._samples, f"only {finished} of {self._samples} finished"
        return outputs, None
