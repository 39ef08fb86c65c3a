"""The items of one step's sampling: filled in from what rows ask for, run, and read.

Everything that items refer to by its address is kept here until they are done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.adjusting import adjusting
from engine.drawing import drawing, weighing
from engine.ranking import picking, ranking, telling
from engine.sampling_item import (
    ADDED,
    ADDED_IDS,
    ADDENDS,
    BEST,
    COUNT,
    FACTOR,
    FREQUENCY,
    GROUPS,
    IDS,
    LEAST,
    LOGITS,
    MASK,
    MAXIMA,
    PRESENCE,
    PROMPT_LEN,
    REACHED,
    REPETITION,
    SCORES,
    SEEN,
    SEEN_LEN,
    TOLD,
    TOP_P,
    UNIFORM,
    VOCAB_SIZE,
    WORDS,
    item_part,
    run_items,
)
from engine.score_vectors import GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray

    from kvferry.ids import TokenIds
    from kvferry.sampling import SamplingParams

_ADJUST, _WEIGH = range(2)
"""The first stages of an item."""


class SamplingStep:
    """One item for each of some rows of logits. Item i is of `logits[at[i]]`."""

    def __init__(
        self, logits: NDArray[np.float32], at: Sequence[int], adjusted: Sequence[int], most: int
    ) -> None:
        """`adjusted`: items whose scores are not the logits. `most`: tokens that an item may be
        told of."""
        count, vocab_size = len(at), logits.shape[1]
        groups = -(-vocab_size // GROUP)
        if vocab_size % GROUP:
            adjusted = range(count)
        self._words = np.zeros((count, WORDS), dtype=np.int64)
        self._numbers = self._words.view(np.float64)
        self._maxima = np.empty((count, -(-groups // GROUP) * GROUP), dtype=np.float32)
        self._reached = np.empty((count, groups), dtype=np.float64)
        self._ids = np.zeros((count, max(most, 1)), dtype=np.int64)
        self._told = np.full((count, most), -np.inf)
        self._logits, self._at = logits, at
        self._kept: list[object] = []
        words = self._words
        rows = _addresses(logits)[list(at)]
        words[:, LOGITS] = words[:, SCORES] = rows
        words[:, VOCAB_SIZE], words[:, GROUPS] = vocab_size, groups
        words[:, MAXIMA], words[:, IDS] = _addresses(self._maxima), _addresses(self._ids)
        self._numbers[:, REPETITION : REPETITION + 4] = 1.0, 0.0, 0.0, 1.0
        self._scores = np.empty((len(adjusted), GROUP * groups), dtype=np.float32)
        self._place = {item: place for place, item in enumerate(adjusted)}
        if self._place:
            words[adjusted, SCORES] = _addresses(self._scores)
            words[adjusted, _ADJUST] = adjusting().address

    # --- what is asked of an item ---------------------------------------------------------------

    def add(self, item: int, addends: dict[int, float]) -> None:
        """Add to the scores of tokens."""
        ids = np.array(list(addends), dtype=np.int32)
        numbers = np.array(list(addends.values()), dtype=np.float32)
        self._kept += (ids, numbers)
        places = ids.ctypes.data, numbers.ctypes.data, len(ids)
        self._words[item, [ADDED_IDS, ADDENDS, ADDED]] = places

    def penalize(
        self, item: int, params: SamplingParams, prompt: TokenIds, output: TokenIds
    ) -> None:
        """Change the scores of tokens seen before."""
        seen = np.concatenate((prompt, output), dtype=np.int32)
        self._kept.append(seen)
        places = seen.ctypes.data, len(prompt), len(seen)
        self._words[item, [SEEN, PROMPT_LEN, SEEN_LEN]] = places
        self._numbers[item, REPETITION] = params.repetition_penalty
        self._numbers[item, PRESENCE] = params.presence_penalty
        self._numbers[item, FREQUENCY] = params.frequency_penalty

    def allow(self, item: int, mask: NDArray[np.uint8]) -> None:
        """Let nothing else be chosen; one bit per token, lowest first."""
        words = np.zeros(8 * int(self._words[item, GROUPS]), dtype=np.uint8)
        words[: len(mask)] = mask
        self._kept.append(words)
        self._words[item, MASK] = words.ctypes.data

    def draw(self, item: int, params: SamplingParams, uniform: float) -> None:
        """Have a token drawn."""
        words, numbers = self._words, self._numbers
        vocab_size = int(words[item, VOCAB_SIZE])
        top_k = params.top_k if params.top_k < vocab_size else 0
        is_ranked = top_k > 0 or params.top_p < 1.0
        stages = (weighing(), ranking(), picking()) if is_ranked else (weighing(), drawing())
        words[item, _WEIGH : _WEIGH + len(stages)] = [stage.address for stage in stages]
        words[item, COUNT] = top_k
        numbers[item, FACTOR] = 1.0 / params.temperature
        numbers[item, LEAST] = 0.0 if is_ranked else params.min_p
        numbers[item, TOP_P : UNIFORM + 1] = params.top_p, params.min_p, uniform
        if top_k == 0:
            words[item, REACHED] = self._reached[item].ctypes.data

    def tell(self, item: int, count: int) -> None:
        """Have the most likely tokens told, with their log probabilities."""
        stages = (weighing(), ranking(), telling()) if count else (weighing(),)
        self._words[item, _WEIGH : _WEIGH + len(stages)] = [stage.address for stage in stages]
        self._words[item, REACHED] = self._reached[item].ctypes.data
        if count:
            self._words[item, COUNT] = count
            self._words[item, TOLD] = self._told[item].ctypes.data

    # --- answers --------------------------------------------------------------------------------

    def run(self, board: int) -> None:
        """Have a crew do it."""
        run_items(board, item_part().address, self._words)

    def drawn(self, item: int) -> int:
        """The token that was drawn; the best one where no score is a finite number."""
        is_drawn = np.isfinite(self._numbers[item, BEST])
        return int(self._ids[item, 0]) if is_drawn else self.best(item)

    def best(self, item: int) -> int:
        """The token with the highest score; of equal ones the first."""
        place = self._place.get(item)
        if place is None:
            return int(self._logits[self._at[item]].argmax())
        return int(self._scores[place, : self._logits.shape[1]].argmax())

    def told(self, item: int, count: int) -> tuple[tuple[int, float], ...]:
        """The most likely tokens and their log probabilities, best first."""
        norm, ids = self.norm(item), self._ids[item, :count].tolist()
        scores = self._told[item, :count].tolist()
        pairs = zip(ids, scores, strict=True)
        return tuple((token, score - norm) for token, score in pairs if score > -np.inf)

    def norm(self, item: int) -> float:
        """What log probabilities are short of scores."""
        return float(self._numbers[item, BEST] + np.log(self._reached[item, -1]))


def _addresses(rows: NDArray[Any]) -> NDArray[np.int64]:
    addresses: NDArray[np.int64] = rows.ctypes.data + rows.strides[0] * np.arange(len(rows))
    return addresses
