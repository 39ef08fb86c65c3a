"""A handoff worker in a process of its own, to be killed or stopped by a test.

`python -m tests.support.handoff_child source` prints its address and computes slowly;
`python -m tests.support.handoff_child sink ADDRESS` fetches one prompt from the given source.
"""

from __future__ import annotations

import sys
import threading

import torch

from kvferry.config import HandoffConfig
from kvferry.generation import PrefillSource
from kvferry.ids import Attempt, Incarnation, RequestId, WorkerId
from kvferry.sampling import SamplingParams
from tests.support.handoff_pair import (
    PLAIN_USE,
    HandoffKey,
    LoopThread,
    TestWorker,
    prompt_of,
    small_cache,
    small_layout,
)

SOURCE_INCARNATION, SINK_INCARNATION = Incarnation(101), Incarnation(202)
PROMPT = prompt_of(200, seed=7)
STEP_TOKENS, STEP_S = 4, 0.02


def child_config() -> HandoffConfig:
    layout = small_layout()
    return HandoffConfig(
        staging_buffer_bytes=8 * layout.bytes_per_token, staging_buffers=3, link_timeout_s=5.0
    )


def new_worker(name: str, incarnation: Incarnation, loop: LoopThread) -> TestWorker:
    return TestWorker(name, incarnation, loop, small_cache(small_layout()), child_config())


def child_key() -> HandoffKey:
    return HandoffKey(RequestId("r1"), Attempt(1), SOURCE_INCARNATION, SINK_INCARNATION)


def compute_step(worker: TestWorker) -> None:
    """Schedule what is queued and compute a few tokens of each prompt."""
    source = worker.source
    for key in list(source.queue):
        source.schedule(key)
    for key, kv in list(source.kvs.items()):
        prompt_tokens = len(source.prompts[key])
        if kv.committed_len < prompt_tokens:
            source.compute(key, min(prompt_tokens, kv.committed_len + STEP_TOKENS))
            if key in source.kvs and kv.committed_len == prompt_tokens:
                source.finish(key)


def main() -> None:
    torch.set_num_threads(1)
    role = sys.argv[1]
    incarnation = SOURCE_INCARNATION if role == "source" else SINK_INCARNATION
    worker = new_worker(role, incarnation, LoopThread())
    print(worker.address, flush=True)  # noqa: T201
    if role == "sink":
        source = PrefillSource(WorkerId("source"), sys.argv[2], SOURCE_INCARNATION)
        worker.sink.prompts[child_key()] = PROMPT
        worker.driver.fetch(child_key(), source, PROMPT, SamplingParams(), PLAIN_USE)
    pause = threading.Event()
    while True:
        while worker.step():
            pass
        compute_step(worker)
        pause.wait(STEP_S)


if __name__ == "__main__":
    main()
