"""Which positions a model with sliding-window attention still reads."""

from __future__ import annotations

from dataclasses import dataclass

_STRIDES_PER_WINDOW = 16
"""A request gives up slots in steps of this part of the window: at most 6 % more are held than
needed, and neither the index's edges nor the free list are cut up page by page."""


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The query at position p reads K/V of the positions `(p - tokens, p]`, itself included.

    `tokens` None: it reads all positions up to p. All answers are page boundaries.
    """

    tokens: int | None
    page_size: int
    stride: int
    """Slots are given up when at least this many, whole pages, have become useless."""

    def __post_init__(self) -> None:
        # With a window of 1 a token reads itself alone: there would be nothing to cache.
        assert self.tokens is None or self.tokens >= 2, f"a window of {self.tokens} tokens"
        assert self.stride > 0, "the stride is at least a page"
        assert self.stride % self.page_size == 0, "the stride is whole pages"

    @staticmethod
    def of(tokens: int | None, page_size: int) -> AttentionWindow:
        """A window with the stride that suits its size."""
        pages = 0 if tokens is None else tokens // _STRIDES_PER_WINDOW // page_size
        return AttentionWindow(tokens, page_size, page_size * max(1, pages))

    def needed_from(self, length: int) -> int:
        """Start of the first page that anything after the first `length` tokens reads.

        Below `length` for a `length` of at least one page that is a page boundary.
        """
        if self.tokens is None:
            return 0
        return max(0, length - self.tokens + 1) // self.page_size * self.page_size

    def slid(self, start: int, length: int) -> int:
        """Where a window that began at `start` begins for a request of `length` tokens."""
        needed = self.needed_from(length)
        return needed if needed - start >= self.stride else start
