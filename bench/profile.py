"""Measures how long the steps of a running cluster take, by requests made for it.

Prompts: lengths times shares of them that are cached, one at a time; a worker's own clock says how
long each was computed (`prefill` of its timeline). Answers: batches times lengths, of prompts that
are cached already; the workers' counters say how many steps they took, of how many sequences, and
how long. Both at once: how workers of one machine slow one another down. Prompts are drawn at
random, so that nothing is cached but what is meant to be.

The cluster must be idle otherwise, and its workers equal.
"""

from __future__ import annotations

import math
import random
import secrets
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bench.profile_samples import AnswerSample, Profile, PromptSample
from kvferry.errors import InvalidInput, KvferryError, WorkerUnavailable
from kvferry.rpc.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvferry.clock import Clock

PROMPT_TOKENS = (24, 96, 128, 200, 384, 768, 1400)
CONTEXTS = (64, 512)
ROUNDS = 3
_TRACE_WAIT_S = 5.0
_LOOK_S = 0.05
_IDLE_WAIT_S = 60.0
_COUNTERS = ("decode_steps", "decode_step_sequences", "decode_step_us")


class Server(Protocol):
    """What is asked of a router; `cluster.client.Client` has it."""

    def generate(self, request: inference.GenerateRequest) -> Iterator[inference.GenerateResponse]:
        """The responses as they come."""
        ...

    def cluster_status(self) -> inference.ClusterStatusResponse:
        """What the router knows of its workers."""
        ...

    def traces(self, name: str, count_max: int) -> inference.TracesResponse:
        """Where the time of a request went."""
        ...


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What is asked for."""

    chunk_tokens: int
    """Of the cluster's configuration."""
    page_size: int
    status_interval_s: float
    prompt_tokens: Sequence[int] = PROMPT_TOKENS
    rounds: int = ROUNDS
    batches: Sequence[int] = (1, 2, 4, 8)
    contexts: Sequence[int] = CONTEXTS
    answer_tokens: int = 24
    beside_rounds: int = 2
    beside_prompt_tokens: int = 384
    beside_answer_tokens: int = 64
    token_ids: tuple[int, int] = (1000, 40_000)
    """Prompts are drawn from these."""


@dataclass(frozen=True, slots=True)
class _Answer:
    request_id: str
    ttft_s: float
    usage: inference.Usage


class Profiler:
    """One profile of one cluster."""

    def __init__(
        self,
        server: Server,
        plan: ProfilePlan,
        clock: Clock,
        sleep: Callable[[float], None],
        report: Callable[[str], None],
    ) -> None:
        """`report` is told what is measured next."""
        self._server = server
        self._plan = plan
        self._clock = clock
        self._sleep = sleep
        self._report = report
        self._rng = random.Random(0)
        self._found = Profile()

    def run(self) -> Profile:
        """Measure everything. Raises `KvferryError` for what the cluster cannot tell."""
        self._wait_until_idle()
        # The first requests of processes are slower in everything.
        self._ask(self._tokens(2 * self._plan.chunk_tokens), self._plan.answer_tokens)
        self._prompts()
        self._answers()
        self._beside()
        workers = self._server.cluster_status().workers
        self._found.workers = dict(Counter(each.role for each in workers))
        rates = [each.load.link_bytes_per_s for each in workers]
        self._found.link_bytes_per_s = max(rates, default=0.0)
        return self._found

    # --- prompts alone --------------------------------------------------------------------------

    def _prompts(self) -> None:
        page = self._plan.page_size
        for turn in range(self._plan.rounds):
            self._report(f"prompts, round {turn + 1} of {self._plan.rounds}")
            for length in self._plan.prompt_tokens:
                cold = self._tokens(length)
                self._found.prompts.append(self._prompt_sample(cold))
                cached = length // 2 // page * page
                if cached:
                    warm = cold[:cached] + self._tokens(length - cached)
                    self._found.prompts.append(self._prompt_sample(warm))

    def _prompt_sample(self, tokens: list[int]) -> PromptSample:
        answer = self._ask(tokens, 2)
        usage = answer.usage
        computed_s, before_s = self._spans(answer.request_id)
        new = usage.prompt_tokens - usage.prefill_hit_tokens
        return PromptSample(
            tokens=new,
            steps=math.ceil(new / self._plan.chunk_tokens),
            token_contexts=new * (usage.prefill_hit_tokens + (new - 1) / 2),
            computed_s=computed_s,
            before_s=before_s,
            ttft_s=answer.ttft_s,
            handoff_s=usage.handoff_ms / 1000,
            moved_tokens=usage.moved_tokens,
            moved_bytes=usage.moved_bytes,
        )

    def _spans(self, request_id: str) -> tuple[float, float]:
        """How long its prompt was computed, and when its first attempt began."""
        until = self._clock.now() + _TRACE_WAIT_S
        while self._clock.now() < until:
            for trace in self._server.traces(request_id, 1).requests:
                spans = list(_walk(trace.span))
                computed = [
                    each.end_s - each.start_s
                    for each in spans
                    if each.name == "prefill" and each.HasField("end_s")
                ]
                begun = [each.start_s for each in spans if each.name == "attempt 1"]
                if computed and begun:
                    return computed[-1], begun[0]
            self._sleep(_LOOK_S)
        raise WorkerUnavailable(f"request {request_id} has no timeline with its prompt")

    # --- answers alone --------------------------------------------------------------------------

    def _answers(self) -> None:
        for context in self._plan.contexts:
            for batch in self._plan.batches:
                self._report(f"answers, {batch} at once, context {context}")
                prompts = [self._tokens(context) for _ in range(batch)]
                for prompt in prompts:
                    self._ask(prompt, 1)
                sample = self._answer_sample(prompts, self._plan.answer_tokens, lambda: None)
                self._found.answers.append(sample)

    def _answer_sample(
        self, prompts: list[list[int]], answer_tokens: int, meanwhile: Callable[[], None]
    ) -> AnswerSample:
        before = self._counters()
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(self._ask, prompt, answer_tokens) for prompt in prompts]
            meanwhile()
            for each in asked:
                each.result()
        after = self._counters()
        steps, sequences, micros = (after[name] - before[name] for name in _COUNTERS)
        if steps <= 0 or sequences <= 0 or micros <= 0:
            raise WorkerUnavailable("no worker counted steps of answers alone")
        # An answer of n tokens takes part in n - 1 steps and reads one token more in each.
        mean = sum(len(prompt) + answer_tokens / 2 for prompt in prompts) / len(prompts)
        return AnswerSample(steps, sequences, sequences * mean, micros / 1e6)

    def _counters(self) -> dict[str, int]:
        self._wait_until_idle()
        workers = self._server.cluster_status().workers
        return {name: sum(each.counters.get(name, 0) for each in workers) for name in _COUNTERS}

    # --- all at once ----------------------------------------------------------------------------

    def _beside(self) -> None:
        roles = [each.role for each in self._server.cluster_status().workers]
        prefill, decode = roles.count("prefill"), roles.count("decode")
        if not prefill or not decode:
            self._report("no workers that compute prompts for others: nothing beside one another")
            return
        self._found.others = prefill + decode - 1
        for turn in range(self._plan.beside_rounds):
            self._report(f"all at once, round {turn + 1} of {self._plan.beside_rounds}")
            prompts = [self._tokens(64) for _ in range(2 * decode)]
            for prompt in prompts:
                self._ask(prompt, 1)
            sample = self._answer_sample(
                prompts, self._plan.beside_answer_tokens, lambda: self._keep_computing(prefill)
            )
            self._found.answers_beside.append(sample)

    def _keep_computing(self, streams: int) -> None:
        """Prompts for all workers, as long as answers take, less what the last ones might lack."""
        tokens = self._plan.beside_prompt_tokens
        alone = [each.computed_s / each.tokens for each in self._found.prompts]
        step_s = min(each.seconds / each.steps for each in self._found.answers)
        prompt_s = sorted(alone)[len(alone) // 2] * tokens
        count = max(1, round(step_s * self._plan.beside_answer_tokens / prompt_s))
        prompts = [[self._tokens(tokens) for _ in range(count)] for _ in range(streams)]

        def stream(mine: list[list[int]]) -> list[PromptSample]:
            return [self._prompt_sample(prompt) for prompt in mine]

        with ThreadPoolExecutor(streams) as pool:
            for found in pool.map(stream, prompts):
                self._found.prompts_beside += found

    # --- requests -------------------------------------------------------------------------------

    def _ask(self, tokens: list[int], answer_tokens: int) -> _Answer:
        request = inference.GenerateRequest(
            request_id=f"profile-{secrets.token_hex(8)}",
            token_ids=inference.TokenIds(ids=tokens),
            sampling=inference.SamplingParams(
                max_tokens=answer_tokens, temperature=0.0, ignore_eos=True
            ),
        )
        began, first = self._clock.now(), None
        for response in self._server.generate(request):
            if first is None and response.token_ids:
                first = self._clock.now()
            if response.HasField("finish") and response.finish.HasField("usage"):
                assert first is not None, "an answer has a first token"
                return _Answer(request.request_id, first - began, response.finish.usage)
        raise WorkerUnavailable(f"request {request.request_id} ended without its usage")

    def _wait_until_idle(self) -> None:
        """Until statuses are younger than the last request. Raises if others use the cluster."""
        until = self._clock.now() + _IDLE_WAIT_S
        while self._server.cluster_status().requests_in_flight:
            if self._clock.now() > until:
                raise KvferryError("the cluster is not idle: others use it")
            self._sleep(_LOOK_S)
        self._sleep(3 * self._plan.status_interval_s)

    def _tokens(self, count: int) -> list[int]:
        if count < 1:
            raise InvalidInput("prompt_tokens", f"is {count}; at least 1")
        return [self._rng.randrange(*self._plan.token_ids) for _ in range(count)]


def _walk(span: inference.TraceSpan) -> Iterator[inference.TraceSpan]:
    yield span
    for child in span.children:
        yield from _walk(child)
