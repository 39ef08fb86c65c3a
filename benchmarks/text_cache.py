"""What the cache of tokenized texts saves on the follow-up turns of a conversation.

    python -m benchmarks.text_cache --json

`whole_ms` is the time for tokenizing each turn's whole conversation by the library, `cached_ms`
the time that the router takes for it, the chat template included, when it has served the turn
before; medians over all turns. Both give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock
from kvferry.config import ModelConfig
from router.request import ChatMessage
from router.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_CLOCK = MonotonicClock()
_TURN_CHARACTERS = 1500


def _conversation(turns: int) -> list[ChatMessage]:
    """Of our own code, in turns of different texts."""
    root = Path(__file__).parent.parent
    text = "".join(file.read_text() for file in sorted(root.glob("router/*.py")))
    assert len(text) >= turns * _TURN_CHARACTERS, "no text for so many turns"
    contents = (text[turn * _TURN_CHARACTERS :][:_TURN_CHARACTERS] for turn in range(turns))
    roles = ("user", "assistant")
    return [ChatMessage(roles[turn % 2], content) for turn, content in enumerate(contents)]


def _timed(encode: Callable[[], Iterable[int]]) -> tuple[float, list[int]]:
    """Milliseconds, and the ids."""
    begun = _CLOCK.now()
    ids = encode()
    return 1000.0 * (_CLOCK.now() - begun), list(ids)


def measure(turns: int) -> dict[str, float]:
    """Figures of one conversation; what the two ways give is compared."""
    directory = resolve_model(ModelConfig().path)
    ours, messages = load_tokenizer(directory), _conversation(turns)
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert ours.chat_template is not None
    ours.encode_chat(messages[:1])
    whole_ms, cached_ms, tokens = [], [], 0
    for length in range(2, turns + 1):
        turn = messages[:length]
        text = ours.chat_template.render(turn)
        spent, whole = _timed(partial(_whole, library, text))
        whole_ms.append(spent)
        spent, cached = _timed(partial(ours.encode_chat, turn))
        cached_ms.append(spent)
        assert whole == cached, "not the tokens of the whole"
        tokens = len(whole)
    return {
        "turns": turns,
        "tokens_last_turn": tokens,
        "whole_ms": round(statistics.median(whole_ms), 3),
        "cached_ms": round(statistics.median(cached_ms), 3),
        "whole_last_ms": round(whole_ms[-1], 3),
        "cached_last_ms": round(cached_ms[-1], 3),
    }


def _whole(library: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = library.encode(text, add_special_tokens=False).ids
    return ids


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.turns)
    print(json.dumps(figures) if arguments.json else figures)  # noqa: T201


if __name__ == "__main__":
    main()
