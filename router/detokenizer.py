"""Token ids to text, as they come, never showing a part of a character.

The text of all pieces together equals what the tokenizer decodes from all ids at once.

* `ByteLevelDetokenizer` for byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): a token is a sequence
  of bytes, and an incremental UTF-8 decoder keeps what does not make a character yet.
* `WindowDetokenizer` for every other decoder: decodes a short window of tokens twice, without
  and with the new one, and shows the difference.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"

_WINDOW_TOKENS_MAX = 8
"""Tokens held back at most for a character that never completes. UTF-8 needs 4 one-byte tokens."""


class Detokenizer(Protocol):
    """Text of one sequence of tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        ...

    def flush(self) -> str:
        """What is left when no token follows: an incomplete character becomes U+FFFD."""
        ...


def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: the printable character that stands for each byte in a vocabulary.

    Bytes that are printable in Latin-1 stand for themselves; the others, in order, for the
    characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHARACTER = byte_of_character()


def token_bytes(token: str) -> bytes:
    """The bytes a byte-level vocabulary entry stands for; added tokens stand for themselves."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


class ByteLevelDetokenizer:
    """Exact and O(1) per token. `bytes_of` gives what a token stands for; none if it is not shown.

    Bytes and not characters, so that a character that several tokens make up comes out whole.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._left = b""
        """Bytes that do not make a character yet, at most 3."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Complete characters only."""
        data = self._left + b"".join(map(self._bytes_of, token_ids))
        text, taken = codecs.utf_8_decode(data, "replace", False)
        self._left = data[taken:]
        return text

    def flush(self) -> str:
        """One U+FFFD if bytes are left."""
        text, _ = codecs.utf_8_decode(self._left, "replace", True)
        self._left = b""
        return text


class WindowDetokenizer:
    """For decoders that look at neighbouring tokens, such as SentencePiece's.

    `decode` maps ids to text without special tokens. The window begins with the tokens shown
    last, because decoders treat the first token of a text differently.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0
        """Tokens of the window whose text has been shown."""

    def push(self, token_ids: Sequence[int]) -> str:
        """New text, unless it could end within a character."""
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._unseen()
        held = len(self._window) - self._shown
        if text.endswith(_REPLACEMENT) and held < _WINDOW_TOKENS_MAX:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """Everything that was held back."""
        return self._show(self._unseen())

    def _unseen(self) -> str:
        before = self._decode(self._window[: self._shown])
        return self._decode(self._window)[len(before) :]

    def _show(self, text: str) -> str:
        if text:
            self._window = self._window[self._shown :]
            self._shown = len(self._window)
        return text
