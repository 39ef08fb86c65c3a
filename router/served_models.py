"""The names that clients may ask for: the model's own, and those of its adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import UnknownModel
from kvferry.ids import NO_ADAPTER
from kvferry.limits import REQUEST_ID_CHARACTERS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.ids import AdapterId


class ServedModels:
    """What a cluster serves, by name."""

    def __init__(self, model: str, adapters: Mapping[str, AdapterId]) -> None:
        """`adapters`: by their names, none of which is that of the model."""
        self.model = model
        self.adapters = dict(adapters)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the model, then of its adapters."""
        return (self.model, *self.adapters)

    def name_of(self, asked: str) -> str:
        """What a client means; empty: the model. Raises `UnknownModel`."""
        if asked and asked not in self.names:
            raise UnknownModel(asked[:REQUEST_ID_CHARACTERS_MAX], *self.names)
        return asked or self.model

    def adapter_of(self, asked: str) -> AdapterId:
        """What prompts are to be computed with, if not with the model alone. Raises
        `UnknownModel`."""
        return self.adapters.get(self.name_of(asked), NO_ADAPTER)
