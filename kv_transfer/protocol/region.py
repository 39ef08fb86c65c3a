"""A piece of a prompt's KV: some tokens, some layers."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Region:
    """Tokens [token_start, token_stop) in layers [layer_start, layer_stop). Never empty."""

    token_start: int
    token_stop: int
    layer_start: int
    layer_stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.token_start < self.token_stop, f"no tokens in {self}"
        assert 0 <= self.layer_start < self.layer_stop, f"no layers in {self}"

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return self.token_stop - self.token_start

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return self.layer_stop - self.layer_start

    @property
    def cells(self) -> int:
        """Tokens times layers: what its bytes are proportional to."""
        return self.tokens * self.layers

    def cut(self, cells_max: int) -> tuple[Region, Region | None]:
        """The first tokens, all layers of them, at most `cells_max` cells; and what remains.

        `cells_max` must hold one token.
        """
        tokens = cells_max // self.layers
        assert tokens > 0, f"{cells_max} cells do not hold a token of {self.layers} layers"
        if tokens >= self.tokens:
            return self, None
        middle = self.token_start + tokens
        return replace(self, token_stop=middle), replace(self, token_start=middle)
