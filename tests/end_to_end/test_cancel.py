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
    from collections.abc import Iterator

    from engine.step_loop import EngineSnapshot
    from tests.support.prompts import Prompt

WAIT_S = 20.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    config = load_config(None, {}, {"scheduler.chunk_tokens": "128", "scheduler.running_max": "1"})
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


def _queued(prefill: EngineSnapshot, decode: EngineSnapshot) -> bool:
    return prefill.load.waiting > 0


def _prefilling(prefill: EngineSnapshot, decode: EngineSnapshot) -> bool:
    return prefill.load.running > 0


def _transferring(prefill: EngineSnapshot, decode: EngineSnapshot) -> bool:
    return decode.accounts.inbound > 0 and decode.counters["chunks_received"] > 0


def _decoding(prefill: EngineSnapshot, decode: EngineSnapshot) -> bool:
    return decode.load.running > 0


@pytest.mark.parametrize("how", ["disconnect", "cancel-call"])
@pytest.mark.parametrize("stage", ["queued", "prefilling", "transferring", "decoding"])
def test_cancel_returns_to_idle_accounts(
    cluster: InProcessCluster, prompts: list[Prompt], stage: str, how: str
) -> None:
    prefill, decode = cluster.workers
    reached = {
        "queued": _queued,
        "prefilling": _prefilling,
        "transferring": _transferring,
        "decoding": _decoding,
    }[stage]
    salt = 100 + 7 * ["queued", "prefilling", "transferring", "decoding"].index(stage) + len(how)
    streams = [_stream(cluster, _long(prompts, salt), f"{stage}-{how}")]
    if stage == "queued":
        streams.append(_stream(cluster, _long(prompts, salt + 1000), f"{stage}-{how}-2"))
    wait_until(stage, lambda: reached(prefill.snapshot(), decode.snapshot()), WAIT_S)

    for number, stream in enumerate(reversed(streams)):
        if how == "disconnect":
            stream.cancel()
        else:
            suffix = "-2" if len(streams) == 2 and number == 0 else ""
            reply = cluster.stub.Cancel(
                inference.CancelRequest(request_id=f"{stage}-{how}{suffix}"), timeout=5
            )
            assert reply.found

    cluster.wait_idle(within_s=1.0)
    for stream in streams:
        if how == "disconnect":
            assert stream.code() is grpc.StatusCode.CANCELLED
        else:
            *_, last = stream
            assert last.finish.reason == inference.FINISH_REASON_CANCELLED
    # The workers are not only idle but well.
    answer = cluster.generate(prompts[3].ids, 3)
    assert len(answer.token_ids) == 3
    cluster.wait_idle(within_s=1.0)
