"""How `benchmarks.engine` talks to another engine in a process of its own: a line each way.

| the benchmark writes | the peer writes, as one JSON object |
|---|---|
| nothing: the process has started | what it reports of itself, once it has made a first token |
| `prefill N` | `{}`, once it could compute a prompt of N tokens |
| `decode B C` | `{}`, once it holds B sequences of C tokens |
| `step` | `{"seconds": S}`, after one step of what was prepared last |

A peer ends when its input ends. It runs in an environment of its own, with what it needs in other
versions than ours: this file imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Peer(Protocol):
    """An engine that has loaded its model."""

    def report(self) -> Mapping[str, object]:
        """`version`, and as the engine itself says it: `dtype` of weights, `threads`."""
        ...

    def prefill(self, tokens: int) -> Callable[[], None]:
        """A step that computes a prompt of `tokens` and the logits after it."""
        ...

    def decode(self, batch: int, context: int) -> Callable[[], None]:
        """A step that computes one token of `batch` sequences of `context` tokens."""
        ...


def prompt(tokens: int, number: int) -> list[int]:
    """Token ids of a prompt; another number is another prompt from its first token on."""
    return [(index * 7919 + 100 + 37 * number) % 40_000 for index in range(tokens)]


def serve(load: Callable[[], Peer]) -> None:
    """Answer until the input ends."""
    # Engines print what they like: of our output nothing is theirs.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = load()
    peer.prefill(8)()
    print(json.dumps(dict(peer.report())), file=answers)
    step: Callable[[], None] | None = None
    for line in sys.stdin:
        what, *numbers = line.split()
        answer = {}
        if what == "step":
            assert step is not None, "nothing was prepared"
            before = time.perf_counter()
            step()
            answer["seconds"] = time.perf_counter() - before
        elif what == "prefill":
            step = peer.prefill(*map(int, numbers))
        else:
            assert what == "decode", what
            step = peer.decode(*map(int, numbers))
        print(json.dumps(answer), file=answers)
