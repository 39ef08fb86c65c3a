"""A process that compiles the constraints of clients, so that no text can harm a router.

It is run by `router.constraint_gate`: one JSON array `[kind, text]` per line comes in, one answer
per line goes out, null or the problem. A constraint that takes too much time, memory or stack ends
the process. So does the end of its input, which comes with the end of the router.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from kvferry.errors import InvalidInput
from kvferry.grammar import GrammarCompiler
from kvferry.limits import CONSTRAINT_COMPILE_BYTES_MAX, CONSTRAINT_COMPILE_CPU_S_MAX
from kvferry.sampling import Constraint, ConstraintKind

READY = "ready"
_ANY = Constraint(ConstraintKind.REGEX, "a")
"""Compiled before the first: reads the tokenizer, which no client's constraint is to pay for."""


def main() -> None:
    """Arguments: the model's directory, its vocabulary's size, its ids of ends."""
    directory, *numbers = sys.argv[1:]
    vocab_size, *eos_token_ids = map(int, numbers)
    limits = (CONSTRAINT_COMPILE_BYTES_MAX, CONSTRAINT_COMPILE_BYTES_MAX)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler = GrammarCompiler(Path(directory), vocab_size, tuple(eos_token_ids), kept_max=1)
    _problem(compiler, _ANY)
    _tell(READY)
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        # The signal that comes after so much processor time ends the process.
        signal.setitimer(signal.ITIMER_PROF, CONSTRAINT_COMPILE_CPU_S_MAX)
        problem = _problem(compiler, Constraint(ConstraintKind(kind), text))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _tell(problem)


def _problem(compiler: GrammarCompiler, constraint: Constraint) -> str | None:
    try:
        compiler.compile(constraint).result()
    except InvalidInput as error:
        return error.problem
    return None


def _tell(answer: str | None) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
