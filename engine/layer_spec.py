"""What a layer of a decoder consists of. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

Windows: TypeAlias = tuple[int | None, ...]
"""By layer: tokens, itself included, that each token attends to; None: all before it."""


class Activation(Enum):
    """What the gate of an MLP goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class Biases:
    """Which projections of a layer add one."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class Norms:
    """RMSNorms of a layer, besides the two that each has."""

    per_head: bool = False
    """Each query and key head has one, before it is rotated."""
    on_outputs: bool = False
    """What attention and MLP put out has one, before it is added to the residual."""
    offset: float = 0.0
    """Added to every weight: some checkpoints store their distance from one."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What checkpoints call the tensors of a mixture of experts, within a layer."""

    router: str
    experts: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP."""

    count: int
    per_token: int
    width: int
    """Columns of each expert."""
    normalised: bool
    """The weights of a token's experts are scaled to a sum of one."""
    layers: tuple[int, ...]
    """That have it; the others have an MLP."""
    names: ExpertNames
    shared_width: int | None = None
    """Columns of an expert that every token goes through, by a gate of its own; None: there is
    none."""

    def of_rank(self, ranks: int) -> Experts:
        """What each of so many ranks has: some columns of every expert."""
        shared = None if self.shared_width is None else self.shared_width // ranks
        return replace(self, width=self.width // ranks, shared_width=shared)


@dataclass(frozen=True, slots=True)
class Scales:
    """Numbers that a decoder multiplies by, or bounds with."""

    embedding: float = 1.0
    """Embeddings are multiplied by it."""
    score: float | None = None
    """Products of query and key are; None: by 1 / sqrt(head_dim)."""
    score_cap: float | None = None
    """c: scores x become c tanh(x / c), before what is not seen is left out."""
    logit_cap: float | None = None
    """c: logits x become c tanh(x / c)."""


NO_BIASES = Biases()
NO_OTHER_NORMS = Norms()
USUAL_SCALES = Scales()
