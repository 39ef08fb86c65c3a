"""Scheduler, admission and a real KV cache under requests of every kind, on a pool too small.

After every step: the ledger holds, nobody was retracted twice, no victim was assured or the oldest,
what is assured fits, and whoever nothing fixed stands in the way of got on. In the end everybody
has the answer of an undisturbed run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from engine.prompt_order import PASSED_OVER_MAX
from engine.request import Request, Stage
from engine.speculation import Drafts
from kvferry.config import HostTierConfig, SchedulerConfig, WritePolicy
from kvferry.generation import OutputToken
from tests.support.digest_model import VOCAB, next_token
from tests.support.draft_oracle import ALWAYS, foreseen
from tests.support.engine_bench import EngineBench, name_of
from tests.support.state_machines import run_machine

pytestmark = pytest.mark.property

PAGES = {1: 32, 4: 12, 16: 6}
STEPS = 50
CI_EXAMPLES, SLOW_EXAMPLES = 4, 150
SLOW_ROUNDS_MAX = 6
"""Drawn at random, so a round may miss what is rare."""
CI_SEEDS = range(1, 16)
"""Tried in turn until the sample is worth something."""
STOPS = tuple(range(12))
WORTH_SEEING = {"retracted", "returned", "adopted", "stopped early", "held", "forked", "resumed"}
WORTH_SEEING |= {"guessed right"}
WORTH_SEEING_OF_SMALL_PAGES = {"sat out"}
WORTH_SEEING_OF_TIERS = {"loaded"}
WORTH_SEEING_OF_MANY_WITH_TIERS = {"load failed"}
WORTH_SEEING_OF_MANY = {"refused", "sample queued", "sample retracted", "resumed from afar"}
"""What a sample must contain to have tested anything."""


@dataclass(frozen=True)
class _Progress:
    """Where a running request stood before a step."""

    stage: Stage
    uncomputed: int
    num_tokens: int
    retractions: int


class RetractionMachine(RuleBasedStateMachine):
    """One engine; all its requests, the live ones by stage, and what was seen."""

    def __init__(self, page_size: int, index: str, seen: Counter[str]) -> None:
        super().__init__()
        host = HostTierConfig(
            memory_bytes=2**14 if index == "tiers" else 0,
            load_back_tokens_min=1,
            write_policy=WritePolicy.WRITE_BACK,
        )
        drafts = Drafts(foreseen, 3, ALWAYS)
        self.bench = EngineBench(
            page_size=page_size,
            num_slots=PAGES[page_size] * page_size,
            rows=7,
            radix=index != "chunk",
            host=host,
            auditing=False,
            scheduler=SchedulerConfig(output_reserve=0.0, chunk_tokens=13, running_max=6),
            drafts=drafts,
        )
        self.engine, self.cache = self.bench.engine, self.bench.kv_cache
        self.page_size = page_size
        self.is_shared = index != "chunk"
        self.seen = seen
        self.submitted: list[Request] = []
        self.firsts: dict[str, int] = {}
        self.told: dict[str, list[int]] = {}
        """What was known of an answer that another worker began."""
        self.cut: set[Request] = set()

    @property
    def requests(self) -> list[Request]:
        """Every sequence: requests and, once they have parted, their further samples."""
        return [sample for request in self.submitted for sample in request.samples]

    # --- choices ----------------------------------------------------------------------------

    def _request(self, data: st.DataObject, *, prefill_only: bool = False) -> Request:
        """Prompt and answer of random lengths that fit the pool alone; half share a beginning."""
        slots = self.cache.num_slots
        length = data.draw(st.sampled_from(range(1, slots // 2)), label="prompt")
        most = data.draw(st.sampled_from(range(1, slots - length + 1)), label="max_tokens")
        seed = data.draw(st.sampled_from((0, 0, 1, 2)), label="text")
        fork = data.draw(st.sampled_from((0, length // 2, length)), label="fork")
        number = len(self.submitted)
        prompt = [
            20 + (seed * 31 + at if at < fork else number * 17 + at * 7) % (VOCAB - 20)
            for at in range(length)
        ]
        request = self.bench.request(
            f"r{number}",
            prompt,
            max_tokens=most,
            stop_token_ids=data.draw(st.sampled_from(((), STOPS)), label="stops"),
            prefill_only=prefill_only,
            n=data.draw(st.sampled_from((1, 1, 1, 1, 2, 3, 8)), label="n"),
        )
        request.goes_first = number % 3 == 2
        self.submitted.append(request)
        if request.sampling.n == 1 and not prefill_only:
            self._resume(request, data.draw(st.sampled_from((0, 0, 1, most // 2)), label="told"))
        return request

    def _resume(self, request: Request, count: int) -> None:
        """With up to `count` tokens of its answer, and not its last one."""
        told: list[int] = []
        while len(told) < min(count, request.sampling.max_tokens - 1):
            token = next_token([*request.prompt.tolist(), *told])
            if token in request.stop_ids:
                break
            told.append(token)
        request.resume(0, told)
        self.told[name_of(request)] = told
        self.seen["resumed"] += bool(told)

    def _at(self, *stages: Stage) -> list[Request]:
        return [request for request in self.requests if request.stage in stages]

    def _one_at(self, data: st.DataObject, *stages: Stage) -> Request:
        return data.draw(st.sampled_from(self._at(*stages)), label="request")

    # --- arrivals and what roles do -----------------------------------------------------------

    @precondition(lambda self: self.engine.scheduler.waiting < 6)
    @rule(data=st.data(), prefill_only=st.sampled_from((False, False, False, True)))
    def submit(self, data, prefill_only):
        self.engine.submit(self._request(data, prefill_only=prefill_only))

    @precondition(lambda self: self.engine.scheduler.waiting < 6)
    @rule(data=st.data())
    def submit_inbound(self, data):
        self.engine.submit_inbound(self._request(data))

    @rule()
    def begin_handoffs(self):
        """Always possible."""
        while self.engine.next_expected() is not None:
            pass

    @precondition(lambda self: self._at(Stage.EXPECTED))
    @rule(data=st.data())
    def offer(self, data):
        self._offer(self._one_at(data, Stage.EXPECTED))

    @precondition(lambda self: self._at(Stage.EXPECTED))
    @rule(data=st.data())
    def decline(self, data):
        self.engine.compute_here(self._one_at(data, Stage.EXPECTED))

    @precondition(lambda self: self._at(Stage.INBOUND))
    @rule(data=st.data())
    def adopt(self, data):
        self._adopt(self._one_at(data, Stage.INBOUND))

    @precondition(lambda self: self._at(Stage.HELD))
    @rule(data=st.data())
    def close_handoff(self, data):
        self._close(self._one_at(data, Stage.HELD))

    @precondition(lambda self: any(r.stage is not Stage.ENDED for r in self.requests))
    @rule(data=st.data(), really=st.sampled_from((False, False, True)))
    def cancel(self, data, really):
        if really:
            request = self._one_at(data, *(set(Stage) - {Stage.ENDED}))
            self.cut.add(request)
            self.engine.end(request)

    @precondition(lambda self: self.bench.copier.pending)
    @rule(data=st.data(), fails=st.sampled_from((False, False, True)))
    def end_copy(self, data, fails):
        index = data.draw(st.sampled_from(range(len(self.bench.copier.pending))), label="copy")
        self.bench.copier.run(index, OSError("unreadable") if fails else None)
        self.seen["load failed"] += fails

    @rule(steps=st.sampled_from((1, 1, 3, 10)))
    def step(self, steps):
        for _ in range(steps):
            self._step()

    def _offer(self, request: Request) -> None:
        if not self.engine.reserve_inbound(request):
            self.seen["refused"] += 1
            return
        start = request.held_kv.committed_len
        slots = self.cache.slots(request.held_kv, start, request.inbound_len)
        known = request.known[start : request.inbound_len]
        self.bench.runner.receive(slots, known, start)

    def _adopt(self, request: Request) -> None:
        first = next_token(request.prompt.tolist())
        if request.output.size:
            self.seen["resumed from afar"] += 1
        else:
            self.firsts[name_of(request)] = first
        self.cache.commit(request.held_kv, request.inbound_len)
        self.cache.adopt(request.held_kv)
        self.engine.adopt(request, request.sampling.n * (OutputToken(first),))
        self.seen["adopted"] += 1

    def _close(self, request: Request) -> None:
        self.seen["held"] += 1
        self.engine.end(request)

    # --- the step -------------------------------------------------------------------------------

    def _step(self) -> bool:
        """One step, with everything it must not do and must have done."""
        counters, horizon = self.engine.scheduler.counters, self.engine.scheduler.horizon
        sat_out, accepted = counters["steps_sat_out"], self._accepted()
        running = [r for r in self.requests if r.is_retractable]
        before = {r: _Progress(r.stage, r.uncomputed, r.num_tokens, r.retractions) for r in running}
        waiting = self._at(Stage.WAITING)
        others = self._at(Stage.INBOUND, Stage.HELD, Stage.LOADING, Stage.PREFILLING)
        loading = self._at(Stage.LOADING)
        fixed = [r for r in others if not r.is_retractable]
        oldest = min(running, key=lambda r: r.arrival, default=None)
        passed_over = 0 if oldest is None else oldest.passed_over
        computed = self.engine.step()
        self.seen["forked"] += counters["samples_forked"] > 0
        self.seen["sample queued"] += counters["samples_queued"] > 0
        for request, was in before.items():
            if request.retractions > was.retractions:
                self.seen["retracted"] += 1
                assert request.retractions == 1
                assert request.arrival > horizon, "an assured request was retracted"
                older = [r for r in (*running, *loading) if r.arrival < request.arrival]
                assert older, "the oldest was retracted"
                self.seen["sample retracted"] += request.sample > 0
            if request.arrival <= horizon and was.stage is Stage.DECODING:
                assert request.num_tokens > was.num_tokens, "an assured request sat out"
        self.seen["returned"] += any(
            r.retractions and r.stage is not Stage.WAITING for r in waiting
        )
        self.seen["loaded"] += any(
            r.kv is not None and r.kv.host_hit_len and r.stage is not Stage.LOADING for r in loading
        )
        self.seen["guessed right"] += self._accepted() > accepted
        self.seen["sat out"] += counters["steps_sat_out"] > sat_out
        if oldest is not None and not fixed:
            assert computed
            was = before[oldest]
            got_on = oldest.num_tokens > was.num_tokens or oldest.uncomputed < was.uncomputed
            # An older one that was admitted now computes its prompt first, or one that goes first.
            waits = any(r.arrival < oldest.arrival for r in waiting)
            waits |= passed_over < oldest.passed_over <= PASSED_OVER_MAX
            assert got_on or waits, "it did not get on"
        return computed

    def _accepted(self) -> int:
        drafts = self.engine.drafts
        assert drafts is not None
        return drafts.counters["draft_tokens_accepted"]

    # --- after every rule -----------------------------------------------------------------------

    @invariant()
    def what_is_assured_fits(self):
        """The invariant of `engine.admission`, counted from the slots themselves."""
        horizon = self.engine.scheduler.horizon
        held: set[int] = set()
        missing = 0
        for request in self.requests:
            kv = request.kv
            assured = request.arrival <= horizon
            if kv is None or (request.is_retractable and not assured):
                continue
            held |= set(self.cache.slots(kv, 0, kv.allocated_len).tolist())
            if not assured and not request.prefill_only:
                missing += kv.loading_len
            else:
                missing += max(0, self._needed(request) - kv.allocated_len)
        assert len(held) + missing <= self.cache.num_slots

    def _needed(self, request: Request) -> int:
        """Slots of the longest answers of all the samples that it stands for."""
        page = self.page_size
        one = -(-request.kv_len_max // page) * page
        shared = request.prompt_len // page * page if self.is_shared else 0
        return min(one + request.forks_due * (one - shared), self.cache.num_slots)

    @invariant()
    def each_request_is_counted_once(self):
        scheduler = self.engine.scheduler
        stages = Counter(request.stage for request in self.requests)
        assert scheduler.waiting == stages[Stage.WAITING]
        running = (Stage.LOADING, Stage.PREFILLING, Stage.DECODING)
        assert scheduler.running == sum(stages[stage] for stage in running)
        self.cache.audit()

    # --- the end --------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Handoffs end, and then everybody does."""
        self._end_everything()
        for request in self.requests:
            assert request.stage is Stage.ENDED, f"{request.id} is {request.stage} for ever"
            self._check_answer(request)
        self.bench.copier.run_all()
        self.engine.step()
        self.cache.audit()
        assert self.cache.accounts().is_idle

    def _end_everything(self) -> None:
        """Each token is computed at most twice."""
        work = 2 * sum(len(r.tokens) * r.sampling.n for r in self.submitted) + 10
        for _ in range(work):
            self.begin_handoffs()
            for request in self._at(Stage.EXPECTED):
                self._offer(request)
            for request in self._at(Stage.INBOUND):
                self._adopt(request)
            for request in self._at(Stage.HELD):
                self._close(request)
            if not self._at(*(set(Stage) - {Stage.ENDED})):
                break
            if not self._step():
                self.bench.copier.run_all()

    def _check_answer(self, request: Request) -> None:
        name = name_of(request)
        told = self.bench.recorder.told.get(name, [])
        first = self.firsts.get(request.id.request_id)
        if first is not None:
            told = [first, *told]
        told = self.told.get(name, []) + told
        tokens = request.prompt.tolist()
        for token in told:
            assert token == next_token(tokens)
            tokens.append(token)
        if request in self.cut or request.prefill_only:
            return
        stopped = told[-1] in request.stop_ids
        self.seen["stopped early"] += stopped and len(told) < request.sampling.max_tokens
        assert stopped or len(told) == request.sampling.max_tokens
        assert self.bench.recorder.ends[name]


def _run(page_size: int, index: str, examples: int, seed: int | None) -> Counter[str]:
    seen: Counter[str] = Counter()

    def machine() -> RetractionMachine:
        return RetractionMachine(page_size, index, seen)

    run_machine(machine, examples=examples, steps=STEPS, seed=seed)
    return seen


@pytest.mark.parametrize("index", ["radix", "chunk", "tiers"])
@pytest.mark.parametrize("page_size", PAGES)
def test_everybody_finishes_and_nobody_is_retracted_twice(page_size, index):
    wanted = _wanted(page_size, index)
    seen: Counter[str] = Counter()
    for seed in CI_SEEDS:
        seen += _run(page_size, index, CI_EXAMPLES, seed)
        if set(seen) >= wanted:
            return
    raise AssertionError(f"the sample never saw {wanted - set(seen)}")


@pytest.mark.slow
@pytest.mark.parametrize("index", ["radix", "chunk", "tiers"])
@pytest.mark.parametrize("page_size", PAGES)
def test_everybody_finishes_in_many_more_runs(page_size, index):
    wanted = _wanted(page_size, index) | WORTH_SEEING_OF_MANY
    if index == "tiers":
        wanted |= WORTH_SEEING_OF_MANY_WITH_TIERS
    seen: Counter[str] = Counter()
    for _ in range(SLOW_ROUNDS_MAX):
        seen += _run(page_size, index, SLOW_EXAMPLES, None)
        if set(+seen) >= wanted:
            return
    raise AssertionError(f"the sample never saw {wanted - set(+seen)}")


def _wanted(page_size: int, index: str) -> set[str]:
    if index == "tiers":
        return WORTH_SEEING | WORTH_SEEING_OF_TIERS
    return WORTH_SEEING | (WORTH_SEEING_OF_SMALL_PAGES if page_size == 1 else set())
