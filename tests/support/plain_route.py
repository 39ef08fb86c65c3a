"""The choice of a route worker by worker, as it is described: slow, and easy to read.

What `router.policy` does over columns has to come to the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.membership import Role
from router.policies import priced_time as prices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.policies.history import PlacementHistory
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
    uses: Mapping[int, tuple[float, float]],
    prompt_tokens: int,
    busy: float,
    history: PlacementHistory,
) -> list[float]:
    """Of each worker. `uses` are the requests that had a prefix of the length, and the seconds
    since the first; `busy` is the share of workers that have prompts to compute."""
    levels = sorted(set(hits) - {0})
    if not levels:
        return [0.0] * len(hits)
    own_tokens = prompt_tokens - levels[-1] + prices.PROMPT_TOKENS
    own_ms = own_tokens * len(hits) / sum(tokens_per_ms)
    useless, counted_useless, excess = ([0.0] * len(hits) for _ in range(3))
    for start, level in zip([0, *levels], levels, strict=False):
        copies = sum(hit >= level for hit in hits)
        requests = max(uses[level][0] - prices.USES_UNPROVEN, 0.0)
        age_ms = max(1000.0 * uses[level][1], prices.AGE_MIN_MS)
        supply = requests / age_ms * own_ms / prices.BUSY_SHARE / copies
        surplus = max(0.0, 1.0 - supply**prices.SURPLUS_EXPONENT)
        paid = 1.0 + prices.PAID_FACTOR * (requests / copies) ** prices.PAID_EXPONENT
        share = 1.0 / (max(supply, 1.0) ** prices.SHORTAGE_EXPONENT * paid)
        share = max(share, prices.COUNTED_MIN)
        for worker, hit in enumerate(hits):
            missing = level - min(max(hit, start), level)
            useless[worker] += missing * surplus
            counted_useless[worker] += missing * share * surplus
            excess[worker] += missing * (share - 1.0)
    found = []
    for worker, rate in enumerate(tokens_per_ms):
        size = useless[worker] / max(history.typical_tokens, 1.0)
        price = busy * (prices.WORK_PRICE + prices.SIZE_PRICE * size)
        price += prices.EVICTION_PRICE * history.lost_share
        found.append((excess[worker] + price * counted_useless[worker]) / rate)
    return found
