"""The items of one step's sampling: filled in from what rows ask for, run, and read.

Everything that items refer to by its address is kept here until they are done.
"""

from __future__ import annotations

import struct
from functools import cache
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
    CHOSEN,
    COUNT,
    FACTOR,
    FREQUENCY,
    GROUPS,
    IDS,
    LOGITS,
    MASK,
    MAXIMA,
    PLACES_END,
    PRESENCE,
    PROMPT_LEN,
    REACHED,
    REPETITION,
    SCORES,
    SEEN,
    SEEN_LEN,
    TOLD,
    TOLD_LEN,
    UNIFORM,
    VOCAB_SIZE,
    WORDS,
    item_part,
    run_items,
)
from engine.score_vectors import GROUP

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from kvferry.ids import TokenIds
    from kvferry.sampling import SamplingParams

_WORDS = struct.Struct(f"={PLACES_END}q{WORDS - PLACES_END}d")
_NUMBERS = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)
"""From `REPETITION` on: what leaves scores as they are."""


class _Item:
    """What is wanted of one row of logits. Plain numbers: they become words all at once."""

    __slots__ = ("at", "is_adjusted", "numbers", "places", "stages", "told", "wants_sums")

    def __init__(self, at: int) -> None:
        self.at = at
        self.places = [0] * PLACES_END
        self.numbers = list(_NUMBERS)
        self.stages: tuple[int, ...] = _stages()
        self.is_adjusted = False
        """Whether its scores are not the logits."""
        self.wants_sums = False
        self.told: int | None = None
        """Most likely tokens whose log probabilities are wanted; None: not even the norm is."""


class SamplingStep:
    """Items, each of one row of some logits. Whatever is asked of one, its best token is found."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        """logits [N, V], C-contiguous."""
        self.chosen: list[int] = []
        """The token of each item, once it has run: the one that was drawn, or the best one."""
        self._logits = logits
        self._items: list[_Item] = []
        self._kept: list[object] = []
        self._groups = -(-logits.shape[1] // GROUP)
        self._norms: list[float] = []
        self._told: list[tuple[tuple[int, float], ...]] = []

    def item(self, at: int) -> int:
        """Another item, of `logits[at]`; its number."""
        self._items.append(_Item(at))
        return len(self._items) - 1

    # --- what is asked of an item ---------------------------------------------------------------

    def add(self, item: int, addends: dict[int, float]) -> None:
        """Add to the scores of tokens."""
        ids = np.array(list(addends), dtype=np.int32)
        numbers = np.array(list(addends.values()), dtype=np.float32)
        self._kept += (ids, numbers)
        asked = self._items[item]
        asked.is_adjusted = True
        asked.places[ADDED_IDS], asked.places[ADDENDS] = _address(ids), _address(numbers)
        asked.places[ADDED] = len(ids)

    def penalize(self, item: int, params: SamplingParams, known: TokenIds, prompt_len: int) -> None:
        """Change the scores of tokens seen before."""
        seen = np.ascontiguousarray(known, dtype=np.int32)
        self._kept.append(seen)
        asked = self._items[item]
        asked.is_adjusted = True
        asked.places[SEEN] = _address(seen)
        asked.places[PROMPT_LEN], asked.places[SEEN_LEN] = prompt_len, len(seen)
        asked.numbers[REPETITION - PLACES_END] = params.repetition_penalty
        asked.numbers[PRESENCE - PLACES_END] = params.presence_penalty
        asked.numbers[FREQUENCY - PLACES_END] = params.frequency_penalty

    def allow(self, item: int, mask: NDArray[np.uint8]) -> None:
        """Let nothing else be chosen; one bit per token, lowest first."""
        size = 8 * self._groups
        if len(mask) < size:
            mask = np.concatenate((mask, np.zeros(size - len(mask), dtype=np.uint8)))
        self._kept.append(mask)
        self._items[item].places[MASK] = _address(mask)

    def draw(self, item: int, params: SamplingParams, uniform: float) -> None:
        """Have a token drawn. What is to be allowed has been said."""
        asked = self._items[item]
        top_k = params.top_k if params.top_k < self._logits.shape[1] else 0
        is_ranked = top_k > 0 or params.top_p < 1.0
        asked.stages = _stages(is_drawn=not is_ranked, is_picked=is_ranked)
        asked.is_adjusted |= asked.places[MASK] != 0
        asked.wants_sums = top_k == 0
        asked.places[COUNT] = top_k
        least = 0.0 if is_ranked else params.min_p
        numbers = 1.0 / params.temperature, least, params.top_p, params.min_p, uniform
        asked.numbers[FACTOR - PLACES_END : UNIFORM - PLACES_END + 1] = numbers

    def tell(self, item: int, count: int) -> None:
        """Have the most likely tokens told, with their log probabilities."""
        asked = self._items[item]
        asked.stages = _stages(is_told=count > 0)
        asked.wants_sums = True
        asked.told = asked.places[COUNT] = count

    # --- answers --------------------------------------------------------------------------------

    @property
    def is_long(self) -> bool:
        """Whether more is wanted of any item than its best token."""
        return any(
            each.is_adjusted or each.wants_sums or len(each.stages) > 1 for each in self._items
        )

    def run(self, board: int) -> None:
        """Have a crew do it."""
        self._give_scores()
        most = max(each.told or 0 for each in self._items)
        room = _Room(self._groups, most)
        words = np.empty((len(self._items), room.words), dtype=np.int64)
        packed, first = words.data.cast("B"), _address(words)
        for number, each in enumerate(self._items):
            room.give(each, first + 8 * room.words * number)
            _WORDS.pack_into(packed, 8 * room.words * number, *each.places, *each.numbers)
        run_items(board, item_part().address, words)
        self.chosen = words[:, CHOSEN].tolist()
        if any(each.told is not None for each in self._items):
            self._read_told(words, room)

    def told(self, item: int) -> tuple[tuple[int, float], ...]:
        """The most likely tokens and their log probabilities, best first."""
        return self._told[item]

    def norm(self, item: int) -> float:
        """What log probabilities are short of scores."""
        return self._norms[item]

    # --- inside ---------------------------------------------------------------------------------

    def _give_scores(self) -> None:
        """Say where all logits are, and give memory to scores that are not the logits."""
        logits, groups = self._logits, self._groups
        adjusted = [each for each in self._items if each.is_adjusted or logits.shape[1] % GROUP]
        first = _address(logits)
        for each in self._items:
            places = each.places
            places[: len(each.stages)] = each.stages
            places[LOGITS] = places[SCORES] = first + logits.strides[0] * each.at
            places[VOCAB_SIZE], places[GROUPS] = logits.shape[1], groups
        if adjusted:
            memory = np.empty((len(adjusted), GROUP * groups), dtype=np.float32)
            self._kept.append(memory)
            first = _address(memory)
            for number, each in enumerate(adjusted):
                each.places[: len(each.stages) + 1] = adjusting().address, *each.stages
                each.places[SCORES] = first + memory.strides[0] * number

    def _read_told(self, words: NDArray[np.int64], room: _Room) -> None:
        numbers = words.view(np.float64)
        # One after the other in memory: numpy's logarithm of others may be rounded otherwise.
        best, sums = numbers[:, BEST], numbers[:, room.ids - 1].copy()
        norms = best + np.log(sums)
        self._norms = norms.tolist()
        ids, told = words[:, room.ids : room.scores], numbers[:, room.scores :] - norms[:, None]
        found = zip(ids.tolist(), told.tolist(), words[:, TOLD_LEN].tolist(), strict=True)
        self._told = [tuple(zip(ids[:n], told[:n], strict=True)) for ids, told, n in found]


class _Room:
    """What an item finds lies behind its words: maxima, sums, and what it is told."""

    __slots__ = ("ids", "scores", "sums", "words")

    def __init__(self, groups: int, most: int) -> None:
        """In words from the item on."""
        self.sums = WORDS + -(-groups // GROUP) * GROUP // 2
        self.ids = self.sums + groups
        self.scores = self.ids + most
        self.words = self.scores + most

    def give(self, item: _Item, address: int) -> None:
        """To an item at an address."""
        places = item.places
        places[MAXIMA] = address + 8 * WORDS
        places[REACHED] = address + 8 * self.sums if item.wants_sums else 0
        places[IDS], places[TOLD] = address + 8 * self.ids, address + 8 * self.scores


@cache
def _stages(
    *, is_drawn: bool = False, is_picked: bool = False, is_told: bool = False
) -> tuple[int, ...]:
    """Addresses, but for that of `adjusting`."""
    stages = [weighing()]
    if is_drawn:
        stages.append(drawing())
    if is_picked or is_told:
        stages += [ranking(), picking() if is_picked else telling()]
    return tuple(stage.address for stage in stages)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
