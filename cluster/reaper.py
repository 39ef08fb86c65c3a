"""Ends a cluster's processes when its owner is gone without having stopped it.

Ray's servers end with the process that started them, but some of its agents live on for minutes.
The owner starts this script with a pipe as its standard input; when the owner ends, however it
ends, the pipe closes. Uses the standard library only, so that it costs a few megabytes.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from cluster.process_census import kill_all, processes_of

_GRACE_S = 2.0
"""For processes that end by themselves after their owner."""

_ROUNDS = 20
_ROUND_S = 0.25


def main() -> None:
    """Wait for the owner's end, then kill what is left and remove the directory."""
    directory = Path(sys.argv[1])
    sys.stdin.read()
    if not directory.exists():
        return  # The owner has cleaned up by itself.
    time.sleep(_GRACE_S)
    # Several rounds: what is being started while we look is not in the list yet.
    for _ in range(_ROUNDS):
        left = processes_of(directory)
        if not left:
            break
        kill_all(left)
        time.sleep(_ROUND_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
