"""A process that loads the model and answers with one token: `benchmarks.engine` times its start.

python -m benchmarks.first_token DIRECTORY THREADS
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.engine_contenders import PAGE_SIZE, Kvferry

PROMPT_TOKENS = 8


def main() -> None:
    """Print the first token of a short prompt."""
    directory, threads = sys.argv[1:]
    kvferry = Kvferry(Path(directory), int(threads), PAGE_SIZE)
    print(kvferry.first_token(PROMPT_TOKENS), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
