"""The choice of a route worker by worker, as it is described: slow, and easy to read.

What `router.policy` does over columns has to come to the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvferry.membership import Role
from router.policies import priced_time as prices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.policy import CostModel, Demand
    from tests.support.worker_states import WorkerState

Pair = tuple[str | None, str]
"""Who computes, None for whoever decodes; and who decodes."""


def costs_ms(
    workers: Sequence[WorkerState], demand: Demand, model: CostModel, price: Mapping[str, float]
) -> dict[Pair, float]:
    """Of every pair that may serve, `price` of who computes included."""
    sources = [worker for worker in workers if worker.info.role is Role.PREFILL]
    found: dict[Pair, float] = {}
    for decoder in workers:
        if decoder.info.role is Role.PREFILL:
            continue
        name, after = decoder.info.worker_id, decode_ms(decoder, demand, model)
        short = uncached(decoder, demand) <= model.local_prefill_tokens_max
        if decoder.info.role is Role.BOTH or short or not sources:
            found[None, name] = prefill_ms(decoder, demand, model) + after + price[name]
            continue
        for source in sources:
            moved = handoff_ms(decoder, demand, model)
            paid = price[source.info.worker_id]
            cost = prefill_ms(source, demand, model) + moved + after + paid
            found[source.info.worker_id, name] = cost
    return found


def uncached(worker: WorkerState, demand: Demand) -> int:
    return max(1, demand.prompt_tokens - worker.hit_tokens)


def prefill_ms(worker: WorkerState, demand: Demand, model: CostModel) -> float:
    rate = worker.prefill_tokens_per_s or model.prefill_tokens_per_s
    return 1000.0 * (worker.prefill_tokens + uncached(worker, demand)) / rate


def handoff_ms(worker: WorkerState, demand: Demand, model: CostModel) -> float:
    rate = worker.link_bytes_per_s or model.link_bytes_per_s
    moved = max(0, demand.prompt_tokens - worker.hit_tokens) * model.kv_bytes_per_token
    return 1000.0 * moved / rate


def decode_ms(worker: WorkerState, demand: Demand, model: CostModel) -> float:
    steps = min(demand.answer_tokens_max, model.answer_tokens_expected)
    beside = min(worker.sequences, model.running_max - 1)
    step_ms = model.decode_step_ms + beside * model.decode_step_ms_per_sequence
    needed = demand.prompt_tokens - worker.hit_tokens + steps
    no_slots = worker.slots_available is not None and worker.slots_available < needed
    rounds_before = max(worker.sequences // model.running_max, int(no_slots))
    return step_ms * (steps + rounds_before * model.answer_tokens_expected)


def copies_price_ms(
    hits: Sequence[int],
    tokens_per_ms: Sequence[float],
    uses: Mapping[int, float],
    requests: float,
    typical_tokens: float,
) -> list[float]:
    """Of each worker. `uses` are the requests that had a prefix of the length."""
    levels = sorted(set(hits) - {0})
    wasted = [0.0] * len(hits)
    start = 0
    for level in levels:
        copies = sum(hit >= level for hit in hits)
        sure = max(uses[level] - prices.DOUBT * math.sqrt(uses[level]), 0.0)
        share = sure / max(requests, 1.0)
        deserved = min(share * len(hits), sure / prices.USES_PER_COPY)
        waste = 1.0 - (deserved / copies) ** prices.EXPONENT
        if waste > 0.0:
            waste /= 1.0 + uses[level] / copies / prices.USES_PAID
        else:
            waste = max(waste, -prices.DISCOUNT / prices.WORK_PRICE)
        for worker, hit in enumerate(hits):
            wasted[worker] += (level - min(max(hit, start), level)) * waste
        start = level
    return [
        (prices.WORK_PRICE + prices.SIZE_PRICE * max(tokens, 0.0) / max(typical_tokens, 1.0))
        / rate
        * tokens
        for tokens, rate in zip(wasted, tokens_per_ms, strict=True)
    ]
