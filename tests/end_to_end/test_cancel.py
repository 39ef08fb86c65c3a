"""A client that goes away in any stage leaves nothing behind on either worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from kvferry.config import load_config
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.in_process_cluster import InProcessCluster
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.step_loop import EngineSnapshot
    from tests.support.prompts import Prompt

WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    # One at a time, so that a second request queues. All else as users get it.
    config = load_config(None, {}, {"scheduler.running_max": "1"})
    with InProcessCluster(config, (Role.PREFILL, Role.DECODE)) as running:
        yield running


def _stream(cluster: InProcessCluster, ids: tuple[int, ...], request_id: str = "") -> grpc.Call:
    request = inference.GenerateRequest(
        request_id=request_id,
        token_ids=inference.TokenIds(ids=ids),
        sampling=inference.SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True),
    )
    return cluster.stub.Generate(request, timeout=120)


def _long(prompts: list[Prompt], salt: int) -> tuple[int, ...]:
    """About 1,500 tokens that no earlier request has sent."""
    return (salt, *prompts[-1].ids, *next(p for p in prompts if p.name == "length-1000").ids)


def _chunks(decode: EngineSnapshot) -> int:
    """Chunks of KV that have arrived since the worker started."""
    return decode.counters.get("chunks_received", 0)


REACHED: dict[str, Callable[[EngineSnapshot, EngineSnapshot, int], bool]] = {
    "queued": lambda prefill, decode, before: prefill.load.waiting > 0,
    "prefilling": lambda prefill, decode, before: prefill.load.running > 0,
    "transferring": lambda prefill, decode, before: (
        decode.accounts.inbound > 0 and _chunks(decode) > before
    ),
    "decoding": lambda prefill, decode, before: decode.load.running > 0,
}
"""How to see a stage: from both workers, and the chunks that had arrived before the request."""


@pytest.mark.parametrize("how", ["disconnect", "cancel-call"])
@pytest.mark.parametrize("stage", REACHED)
def test_cancel_returns_to_idle_accounts(
    cluster: InProcessCluster, prompts: list[Prompt], stage: str, how: str
) -> None:
    prefill, decode = cluster.workers
    before = _chunks(decode.snapshot())
    salt = 100 + 7 * list(REACHED).index(stage) + len(how)
    streams = [_stream(cluster, _long(prompts, salt), f"{stage}-{how}")]
    if stage == "queued":
        streams.append(_stream(cluster, _long(prompts, salt + 1000), f"{stage}-{how}-2"))
    wait_until(stage, lambda: REACHED[stage](prefill.snapshot(), decode.snapshot(), before), WAIT_S)

    for number, stream in enumerate(reversed(streams)):
        if how == "disconnect":
            stream.cancel()
        else:
            suffix = "-2" if len(streams) == 2 and number == 0 else ""
            reply = cluster.stub.Cancel(
                inference.CancelRequest(request_id=f"{stage}-{how}{suffix}"), timeout=60
            )
            assert reply.found

    cluster.wait_idle()
    for stream in streams:
        if how == "disconnect":
            assert stream.code() is grpc.StatusCode.CANCELLED
        else:
            *_, last = stream
            assert last.finish.reason == inference.FINISH_REASON_CANCELLED
    # The workers are not only idle but well.
    answer = cluster.generate(prompts[3].ids, 3)
    assert len(answer.token_ids) == 3
    cluster.wait_idle()
