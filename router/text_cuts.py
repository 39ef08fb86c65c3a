"""Where a text may be cut so that its pieces, tokenized singly, give the tokens of the whole.

Two kinds of places are safe, for tokenizers of the byte-level BPE family without context:

* Behind an added token such as `<|im_end|>`. The library first finds these, the leftmost and of
  those the longest, and tokenizes what is between them piece by piece.
* Before a space that follows a letter, a digit or ASCII punctuation, where the pattern that cuts
  text into words is known and no word of it goes on over such a place. BPE merges within words
  only, and a pattern without look-behind finds the same words from a border on.

Any other tokenizer gives no cuts: its texts are tokenized whole. Cuts depend only on what stands
before them, up to the one character behind, so a text that goes on has those it had.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PIECE_CHARACTERS = 512
"""A piece ends at the first safe place after so many: long enough that a look-up is cheap beside
tokenizing it (0.1 ms), short enough that little is done again where two texts part."""

_WORD_PATTERNS = frozenset(
    {
        # Llama 3.
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3.
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Known besides GPT-2's, which is the library's own for byte-level text."""

_SPACE_BEHIND_A_WORD = re.compile(r"(?<=[\w!-/:-@\[-`{-~]) ")


@dataclass(frozen=True, slots=True)
class TextCuts:
    """The safe places of one tokenizer."""

    tokens: re.Pattern[str] | None
    """Finds added tokens as the library does; None: no cut behind them."""
    at_spaces: bool

    def pieces(self, text: str) -> Iterator[str]:
        """The text in order, cut at the first safe place behind each `PIECE_CHARACTERS`."""
        begin = 0
        for end in self._cuts(text):
            yield text[begin:end]
            begin = end
        yield text[begin:]

    def _cuts(self, text: str) -> Iterator[int]:
        """Between two added tokens spaces may do. Nothing is cut off behind the last piece."""
        last = 0
        for end, is_token in self._stretches(text):
            while self.at_spaces:
                space = _SPACE_BEHIND_A_WORD.search(text, last + PIECE_CHARACTERS, end)
                if space is None:
                    break
                last = space.start()
                yield last
            if is_token and last + PIECE_CHARACTERS <= end < len(text):
                last = end
                yield last

    def _stretches(self, text: str) -> Iterator[tuple[int, bool]]:
        """Where each added token ends, and the text; whether it is the former."""
        if self.tokens is not None:
            for match in self.tokens.finditer(text):
                yield match.end(), True
        yield len(text), False


NO_CUTS = TextCuts(None, at_spaces=False)


def text_cuts(description: Mapping[str, Any]) -> TextCuts:
    """Those of a tokenizer, by the content of its `tokenizer.json`."""
    model, normalizer = description["model"], description.get("normalizer")
    if model.get("type") != "BPE" or model.get("dropout"):
        return NO_CUTS
    if normalizer is not None and normalizer.get("type") != "NFC":
        return NO_CUTS
    stages = _stages(description.get("pre_tokenizer"))
    if not stages or any(stage["type"] not in ("ByteLevel", "Digits", "Split") for stage in stages):
        return NO_CUTS
    added = description.get("added_tokens", [])
    # These look at, or take, what stands beside them.
    if any(token[name] for token in added for name in ("single_word", "lstrip", "rstrip")):
        return NO_CUTS
    names = [token["content"] for token in added]
    at_spaces = (
        any(map(_makes_words, stages))
        and all(stage["type"] != "Split" or _makes_words(stage) for stage in stages)
        and not any(" " in name for name in names)
    )
    raw = [token["content"] for token in added if not token["normalized"]]
    return TextCuts(_pattern(raw), at_spaces)


def _pattern(names: list[str]) -> re.Pattern[str] | None:
    """The leftmost of the names, the longest of those that begin there."""
    if not names:
        return None
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)))


def _stages(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return list(pre_tokenizer["pretokenizers"])
    return [pre_tokenizer]


def _makes_words(stage: Mapping[str, Any]) -> bool:
    """Whether it begins a word at every space behind another one, whatever is around."""
    match stage["type"]:
        case "ByteLevel":
            return bool(stage["use_regex"])
        case "Split":
            pattern = stage["pattern"].get("Regex")
            return (
                pattern in _WORD_PATTERNS
                and stage["behavior"] == "Isolated"
                and not stage["invert"]
            )
        case _:
            return False
