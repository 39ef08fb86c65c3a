"""A prefill and a decode worker whose pools hold an eighth of what is asked of them at once."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from engine.scheduler import Scheduler
from kvferry.config import SchedulerConfig
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.digest_cluster import digest_cluster, digest_config
from tests.support.digest_model import VOCAB, answer
from tests.support.in_process_cluster import collect

if TYPE_CHECKING:
    from engine.request import Request
    from tests.support.in_process_cluster import InProcessCluster

REQUESTS = 24
MAX_TOKENS = 40
OPTIMIST = SchedulerConfig(output_reserve=0.0)


def _prompts() -> list[list[int]]:
    random = np.random.default_rng(7)
    shared = random.integers(10, VOCAB, 32).tolist()
    lengths = random.integers(8, 40, REQUESTS)
    return [
        shared[: 32 * (number % 2)] + random.integers(10, VOCAB, length).tolist()
        for number, length in enumerate(lengths)
    ]


def _counters(cluster: InProcessCluster) -> Counter[str]:
    total: Counter[str] = Counter()
    for worker in cluster.workers:
        total.update(worker.snapshot().counters)
    return total


@pytest.mark.parametrize("radix", [True, False], ids=["radix", "chunk"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_request_completes_as_if_alone(page_size: int, radix: bool) -> None:
    prompts = _prompts()
    wanted = sum(-(-(len(p) + MAX_TOKENS - 1) // page_size) * page_size for p in prompts)
    slots = wanted // 8 // page_size * page_size
    with digest_cluster(digest_config(page_size, slots, radix=radix, scheduler=OPTIMIST)) as made:
        answers = made.generate_all(prompts, MAX_TOKENS, at_once=REQUESTS)
        made.wait_idle()
        counters = _counters(made)
    assert [list(one.token_ids) for one in answers] == [answer(p, MAX_TOKENS) for p in prompts]
    # Nobody had to be sent again by the router.
    assert {one.finish.usage.attempt for one in answers} == {1}
    assert counters["retractions"] > 0, "there was no pressure"
    assert counters["sink_adopted"] == REQUESTS
    assert counters["sink_aborted"] == 0


def test_clients_that_leave_under_pressure_leave_nothing_behind() -> None:
    prompts = _prompts()
    config = digest_config(16, 192, scheduler=OPTIMIST)
    with digest_cluster(config) as made, ThreadPoolExecutor(REQUESTS) as pool:

        def ask(number: int) -> list[int] | None:
            request = inference.GenerateRequest(
                token_ids=inference.TokenIds(ids=prompts[number]),
                sampling=inference.SamplingParams(
                    max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
                ),
            )
            # Every third client leaves, some while waiting, some in the middle of their answer.
            timeout_s = 60.0 if number % 3 else 0.02 * number
            try:
                return list(collect(made.stub.Generate(request, timeout=timeout_s)).token_ids)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                return None

        told = list(pool.map(ask, range(REQUESTS)))
        made.wait_idle()
    assert None in told, "everyone was served before it left"
    for number, tokens in enumerate(told):
        assert tokens == answer(prompts[number], MAX_TOKENS) or (tokens is None and not number % 3)


def test_offer_that_is_declined_costs_the_client_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.intake.OFFER_PATIENCE_S", 0.0)
    # Room is kept for everyone, and every offer refused once: as if others had outrun promises.
    refused: set[int] = set()
    admit = Scheduler.admit_inbound

    def admit_later(scheduler: Scheduler, request: Request) -> bool:
        if request.arrival in refused or request.arrival % 2:
            return admit(scheduler, request)
        refused.add(request.arrival)
        return False

    monkeypatch.setattr(Scheduler, "admit_inbound", admit_later)
    prompts = _prompts()
    with digest_cluster(digest_config(16, 512, scheduler=OPTIMIST)) as made:
        answers = made.generate_all(prompts, MAX_TOKENS, at_once=8)
        made.wait_idle()
        counters = _counters(made)
    assert [list(one.token_ids) for one in answers] == [answer(p, MAX_TOKENS) for p in prompts]
    assert {one.finish.usage.attempt for one in answers} == {1}
    assert counters["sink_aborted"] == counters["source_aborted"] == len(refused) > 0
    assert counters["sink_adopted"] == REQUESTS - len(refused)
