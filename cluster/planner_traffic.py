"""What a planner looks at, as a router knows it: its log of requests, its workers. Pure.

Everything is counted per interval, as differences to the last look. Requests are told by the
router's log, so that nothing is counted twice, and nothing on the path of a token.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from cluster.planner_input import DecodeSteps, Latency, Traffic, WorkerSeen
from router.request_log import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.planner_capacity import Targets
    from kvferry.ids import Incarnation, WorkerId
    from router.fleet import WorkerSummary
    from router.request_log import AttemptRecord, RequestLog, RequestRecord

_COUNTERS = ("decode_steps", "decode_step_sequences", "decode_step_us")


class TrafficMeter:
    """Of one router; on its event loop."""

    def __init__(self, log: RequestLog, targets: Targets, now: float) -> None:
        self._log = log
        self._targets = targets
        self._looked_at = now
        self._ended: list[RequestRecord] = []
        self._running_tokens = 0
        self._note = self._ended.append
        log.on_end.append(self._note)

    def close(self) -> None:
        """Count no more."""
        self._log.on_end.remove(self._note)

    def look(self, now: float) -> Traffic:
        """Everything since the last look."""
        since, self._looked_at = self._looked_at, now
        running, ended = self._log.running(), [each for each in self._ended if _is_load(each)]
        self._ended.clear()
        running_tokens = sum(map(_tokens, running))
        tokens = running_tokens + sum(map(_tokens, ended)) - self._running_tokens
        self._running_tokens = running_tokens
        every = (*running, *ended)
        prompts = [
            attempt.prefill_tokens
            for record in every
            for attempt in record.attempts
            if attempt.started_at > since
        ]
        return Traffic(
            seconds=max(now - since, 1e-3),
            requests=sum(record.arrived_at > since for record in every),
            prompts=len(prompts),
            prompt_tokens=sum(prompts),
            prompt_tokens_squared=float(sum(each * each for each in prompts)),
            answers=sum(_tokens(record) > 0 for record in ended),
            answer_tokens=max(0, tokens),
            waiting=sum(record.placed_at is None for record in running if record.prepared_at),
            ttft=self._ttft(every, ended, since),
            itl=_latency(_itls(ended), self._targets.itl_s, missed=0),
        )

    def decoding(self) -> Counter[WorkerId]:
        """Answers that are being decoded now, by worker."""
        last = [record.attempts[-1] for record in self._log.running() if record.attempts]
        return Counter(each.decode_worker for each in last if _is_decoding(each))

    def _ttft(
        self, every: Iterable[RequestRecord], ended: Iterable[RequestRecord], since: float
    ) -> Latency:
        """Who was refused had its first token never."""
        firsts = ((record.arrived_at, _first_token_at(record)) for record in every)
        values = [at - arrived for arrived, at in firsts if at is not None and at > since]
        refused = sum(record.outcome is Outcome.REFUSED for record in ended)
        return _latency(values, self._targets.ttft_s, refused)


class WorkerMeter:
    """What workers counted between two looks."""

    def __init__(self) -> None:
        self._counted: dict[tuple[WorkerId, Incarnation], tuple[int, ...]] = {}

    def look(
        self, workers: Sequence[WorkerSummary], decoding: Counter[WorkerId]
    ) -> tuple[WorkerSeen, ...]:
        """Every worker as it is now."""
        before, self._counted = self._counted, {}
        return tuple(self._seen(each, before, decoding[each.info.worker_id]) for each in workers)

    def _seen(
        self,
        worker: WorkerSummary,
        before: dict[tuple[WorkerId, Incarnation], tuple[int, ...]],
        decoding: int,
    ) -> WorkerSeen:
        info, status = worker.info, worker.status
        is_open = worker.is_reachable and not info.is_draining
        if status is None:
            return WorkerSeen(info.worker_id, info.role, is_open)
        counted = tuple(status.counters.get(name, 0) for name in _COUNTERS)
        key = info.worker_id, info.incarnation
        # What a process counted before it was first looked at is of no interval.
        steps, sequences, us = _less(counted, before.get(key, counted))
        self._counted[key] = counted
        accounts = status.accounts
        held = accounts.total - accounts.free - accounts.evictable
        return WorkerSeen(
            info.worker_id,
            info.role,
            is_open,
            prompt_tokens=status.load.waiting_tokens,
            decoding=decoding,
            kv_share=held / accounts.total if accounts.total else 0.0,
            prefill_tokens_per_s=status.load.prefill_tokens_per_s,
            decode=DecodeSteps(steps, sequences, us / 1e6),
        )


def _less(counted: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(counted, before, strict=True))


def _is_load(record: RequestRecord) -> bool:
    """Not what was wrong with itself, or left before anything was done for it."""
    return bool(record.attempts) or record.outcome is Outcome.REFUSED


def _tokens(record: RequestRecord) -> int:
    return sum(attempt.tokens for attempt in record.attempts)


def _first_token_at(record: RequestRecord) -> float | None:
    times = (attempt.first_token_at for attempt in record.attempts)
    return next((at for at in times if at is not None), record.first_token_at)


def _is_decoding(attempt: AttemptRecord) -> bool:
    return attempt.first_token_at is not None and attempt.ended_at is None


def _itls(ended: Iterable[RequestRecord]) -> list[float]:
    usages = (record.usage for record in ended)
    return [each.itl_ms / 1000.0 for each in usages if each is not None and each.itl_ms > 0.0]


def _latency(values: list[float], target: float, missed: int) -> Latency:
    """`missed` had none."""
    if not values:
        return Latency(missed)
    ordered = sorted(values)
    return Latency(
        count=len(ordered) + missed,
        kept=sum(value <= target for value in ordered),
        p50_s=ordered[(len(ordered) - 1) // 2],
        p90_s=ordered[math.ceil(0.9 * len(ordered)) - 1],
    )
