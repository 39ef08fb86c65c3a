"""What is to be sent: chains of requests, each with a prompt that is made when it is needed.

A chain is a conversation: its first request comes by the load, each other one when the answer to
the request that it follows has ended. Chains are what is spread over clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Prompt: TypeAlias = "NDArray[np.int32] | str"
"""Token ids, or a text for the server to cut into tokens."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a workload; its place there is its index."""

    chain: int
    session: int
    answer_tokens: int
    at_s: float | None = None
    """When a trace has it arrive; None: with its chain."""
    think_s: float = 0.0
    """Between the end of the answer that it follows and its own time."""
    followers: tuple[int, ...] = ()
    """Requests that follow its answer."""


class Prompts(Protocol):
    """Makes prompts; equal arguments give equal prompts, in every process."""

    def prompt(self, index: int) -> Prompt:
        """Of the request with this index."""
        ...


@dataclass(frozen=True, slots=True)
class Workload:
    """A whole one, as every client knows it; each sends its own chains."""

    name: str
    requests: tuple[Planned, ...]
    starts: tuple[int, ...]
    """The first request of each chain, in the order in which chains begin."""
    prompts: Prompts

    @property
    def has_times(self) -> bool:
        """Whether a trace says when chains begin."""
        return bool(self.starts) and self.requests[self.starts[0]].at_s is not None


class TokenSource:
    """Tokens that look like none of the special ones, the same for the same names.

    Special tokens stand at one of the ends of a vocabulary, so an eighth of it is left out there.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._lowest, self._beyond = vocab_size // 8, vocab_size - vocab_size // 8

    def tokens(self, count: int, *names: int) -> NDArray[np.int32]:
        """[count] int32. `names` are what makes them these: a block, a session and a turn."""
        draws = np.random.default_rng((self._seed, *names))
        return draws.integers(self._lowest, self._beyond, count, dtype=np.int32)
