"""Pages whose every byte follows from their number, and a process that files them until killed.

`python -m tests.support.file_tier_child FOLDER SEED` prints a line for each page that is filed.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np

from kvferry.ids import ExtraKey
from mem_cache.file_tier import FileTier
from mem_cache.page_file import page_digests

LAYOUT = "0123456789abcdef"
PAGE_SIZE = 4
PAGE_BYTES = 40_000
NUM_PAGES = 60
FILE_BYTES = 96 + 4 * PAGE_SIZE + PAGE_BYTES + 32
ROOM = 20
"""Files that fit: a third of the pages, so that most writes evict."""


def tokens_of_page(number: int) -> bytes:
    """int32 [PAGE_SIZE]"""
    return np.arange(number, number + PAGE_SIZE, dtype="<i4").tobytes()


def digest_of_page(number: int) -> bytes:
    tokens = np.frombuffer(tokens_of_page(number), dtype="<i4")
    return page_digests(LAYOUT, ExtraKey(""), tokens, PAGE_SIZE)[0]


def bytes_of_page(number: int) -> bytes:
    return np.random.default_rng(number).bytes(PAGE_BYTES)


def open_tier(folder: Path) -> FileTier:
    return FileTier(folder, LAYOUT, PAGE_BYTES, ROOM * FILE_BYTES)


def main() -> None:
    tier, rng = open_tier(Path(sys.argv[1])), random.Random(sys.argv[2])
    while True:
        number = rng.randrange(NUM_PAGES)
        tier.put(digest_of_page(number), tokens_of_page(number), memoryview(bytes_of_page(number)))
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
