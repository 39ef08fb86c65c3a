"""The served model's tokenizer: text and conversations to token ids, and back."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from kvferry.errors import ConfigError, InvalidInput
from kvferry.limits import PROMPT_CHARACTERS_PER_TOKEN_MAX
from kvferry.model_files import read_json
from router.chat_template import ChatTemplate
from router.detokenizer import ByteLevelDetokenizer, WindowDetokenizer, token_bytes
from router.text_cache import TextCache
from router.text_cuts import text_cuts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kvferry.ids import TokenIds
    from router.detokenizer import Detokenizer
    from router.request import ChatMessage, Tool

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
"""SentencePiece's name of a byte that is part of no known piece."""

_GIL_CHARACTERS_MAX = 2048
"""The library tokenizes a text of this length in less than a millisecond. Meanwhile no other thread
runs, unless it is asked for a batch, which costs a hop to a thread of its own."""

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Thread-safe: encoding may run beside the event loop.

    Texts are tokenized in pieces that are remembered, so a conversation that goes on costs the
    tokenizing of what is new. The ids are those of the whole text (see `text_cuts`).
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        description = json.loads(tokenizer.to_str())
        self._is_byte_level = _has_byte_level_decoder(description)
        self._cuts = text_cuts(description)
        self._known = TextCache()
        self._affixes = _affixes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._shown = _ShownBytes(self)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self.chat_template is not None

    def encode(self, text: str, tokens_max: int | None = None) -> TokenIds:
        """Ids of a text prompt, with the special tokens that the tokenizer itself adds.

        Raises `InvalidInput` naming `text` as soon as there are more than `tokens_max`.
        """
        if self._affixes is None:
            _check_characters("text", text, tokens_max)
            return self._encode("text", text, add_special_tokens=True)
        before, after = self._affixes
        return np.concatenate((before, *self._pieces("text", text, tokens_max), after))

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        template_options: str = "",
        tokens_max: int | None = None,
    ) -> TokenIds:
        """Ids of a rendered conversation.

        The template writes all special tokens, so the tokenizer adds none. Raises
        `InvalidInput` naming `chat` when the model has no template or this one refuses, and as
        soon as there are more ids than `tokens_max`.
        """
        if self.chat_template is None:
            raise InvalidInput("chat", "this model has no chat template; send text or token_ids")
        text = self.chat_template.render(messages, tools, template_options)
        return np.concatenate(tuple(self._pieces("chat", text, tokens_max)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a whole sequence, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, alone; a special token stands for its name."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None or self._is_byte_level or token_id in self._special_ids:
            return b"" if token is None else token_bytes(token)
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:-1], 16)])
        return token.replace("\u2581", " ").encode()

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one stream of tokens."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._shown.__getitem__)
        return WindowDetokenizer(self.decode)

    def _pieces(self, field: str, text: str, tokens_max: int | None) -> Iterator[TokenIds]:
        """Ids of the text's pieces; only those that were not met before are tokenized.

        `field` is named by the `InvalidInput` raised for what is no text, or too long.
        """
        _check_characters(field, text, tokens_max)
        count = 0
        for piece in self._cuts.pieces(text):
            ids = self._known.get(piece)
            if ids is None:
                ids = self._encode(field, piece, add_special_tokens=False)
                self._known.put(piece, ids)
            count += ids.size
            if tokens_max is not None and count > tokens_max:
                problem = f"has {count} tokens or more; the context of {tokens_max} holds no more"
                raise InvalidInput(field, problem)
            yield ids

    def _encode(self, field: str, text: str, *, add_special_tokens: bool) -> TokenIds:
        try:
            if len(text) <= _GIL_CHARACTERS_MAX:
                encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            else:
                (encoding,) = self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
        except TypeError as error:
            # The library's word for a string that UTF-8 cannot express.
            raise InvalidInput(field, "has half a surrogate pair, which is no character") from error
        return np.asarray(encoding.ids, dtype=np.int32)

    def shown_bytes(self, token_id: int) -> bytes:
        """What one byte-level token adds to a text; a special token adds nothing."""
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)


class _ShownBytes(dict[int, bytes]):
    """`Tokenizer.shown_bytes` by id, asked once per token of the vocabulary; workers say no others.

    A dict that fills itself: where nothing is missing, a look-up runs no line of Python.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        shown = self[token_id] = self._tokenizer.shown_bytes(token_id)
        return shown


def _check_characters(field: str, text: str, tokens_max: int | None) -> None:
    """Refuse what is too long by far without looking at all of it. Raises `InvalidInput`."""
    if tokens_max is None:
        return
    longest = tokens_max * PROMPT_CHARACTERS_PER_TOKEN_MAX
    if len(text) > longest:
        problem = f"has {len(text)} characters; at most {longest} for a context of {tokens_max}"
        raise InvalidInput(field, problem)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

    Only the first must exist. Raises `ConfigError` naming `model.path`.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ConfigError("model.path", f"{file} does not exist")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError("model.path", f"{file} is not a tokenizer: {error}") from error
    # Stored settings for training batches; a prompt is never cut or padded silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Tokenizer(tokenizer, _load_chat_template(directory))


def _load_chat_template(directory: Path) -> ChatTemplate | None:
    config_file = directory / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    template_file = directory / "chat_template.jinja"
    if template_file.is_file():
        source: str | None = _read_template(template_file)
    else:
        source = _template_source(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, _special_tokens(config))


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("model.path", f"cannot read {file}: {error}") from error


def _template_source(value: Any) -> str | None:
    """One template, or the one named `default` of several."""
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value}.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _has_byte_level_decoder(description: Mapping[str, Any]) -> bool:
    decoder = description.get("decoder") or {}
    stages = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    return [stage.get("type") for stage in stages] == ["ByteLevel"]


def _affixes(tokenizer: tokenizers.Tokenizer) -> tuple[TokenIds, TokenIds] | None:
    """The special tokens that the tokenizer puts before and behind every text.

    None for one whose doing is not that simple.
    """
    found = set()
    for probe in ("a", "b c"):
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        dressed = tokenizer.encode(probe, add_special_tokens=True).ids
        places = [
            begin
            for begin in range(len(dressed) - len(bare) + 1)
            if dressed[begin : begin + len(bare)] == bare
        ]
        if len(places) != 1:
            return None
        begin = places[0]
        found.add((tuple(dressed[:begin]), tuple(dressed[begin + len(bare) :])))
    if len(found) != 1:
        return None
    before, after = found.pop()
    return np.asarray(before, dtype=np.int32), np.asarray(after, dtype=np.int32)
