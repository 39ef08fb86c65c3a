"""A peer of `benchmarks.engine` for tests: `python -m tests.support.fake_peer DTYPE THREADS`.

A step of a batch of B takes no time and fails from B = 99 on. It prints, as engines do.
"""

from __future__ import annotations

import sys

from benchmarks.peers.line_protocol import serve


class FakePeer:
    def report(self):
        return {"version": "1", "dtype": sys.argv[1], "threads": int(sys.argv[2])}

    def prefill(self, tokens):
        print("prefill", tokens)  # noqa: T201
        return lambda: None

    def decode(self, batch, context):
        def step():
            assert batch < 99, f"no room for {batch}"

        return step


if __name__ == "__main__":
    serve(FakePeer)
