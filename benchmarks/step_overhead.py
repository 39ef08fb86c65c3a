"""What a decode step costs beside the model: everything between two forwards, on the real path.

    python -m benchmarks.step_overhead --json [--kind greedy seeded ...] [--batch 1 8 32]
                                              [--steps 60] [--threads 2] [--context 128]

A whole worker in this process: its gRPC server, inbox, scheduler, model, sampler, listeners and
streams. Its client is a process of its own that reads every message. Measured at the model: from
the return of one forward to the call of the next one the engine thread samples, commits, tells,
takes its snapshot, drains its inbox, plans, and builds the next batch.

One JSON object per kind of sampling and batch: {"kind", "batch", "step_p50_ms", "overhead_p50_ms",
"overhead_p99_ms", "share_p50", "overhead_cpu_p50_ms", "streams_cpu_p50_ms"}. Overheads are wall
time of the engine thread, `overhead_cpu` its CPU time: on a busy machine only that says something.
`streams_cpu` is what the event loop took per step to write the messages, beside the next forward.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import grpc
from tokenizers import Tokenizer

from benchmarks.command_line import as_text, setting
from benchmarks.token_gaps import percentile
from cluster.local_cluster import with_model_directory
from cluster.worker_process import WorkerProcess
from engine.model_directory import resolve_model
from kvferry.clock import MonotonicClock, thread_cpu_s
from kvferry.config import load_config
from kvferry.convert import sampling_to_wire
from kvferry.ids import WorkerId
from kvferry.membership import Role
from kvferry.rpc.v1 import worker_pb2, worker_pb2_grpc
from kvferry.sampling import Constraint, ConstraintKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    import torch

    from engine.forward_batch import ForwardBatch
    from engine.model_spec import ModelSpec
    from engine.step_runner import StepRunner
    from kvferry.membership import WorkerInfo

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_DRAWN = replace(_GREEDY, temperature=0.8, seed=7)
_SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 5000}},
    "required": ["words"],
    "additionalProperties": False,
}
KINDS = {
    "greedy": _GREEDY,
    "seeded": _DRAWN,
    "top_k": replace(_DRAWN, top_k=40),
    "top_p": replace(_DRAWN, top_p=0.9),
    "top_k_top_p": replace(_DRAWN, top_k=40, top_p=0.9),
    "penalties": replace(
        _DRAWN, top_k=40, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.2
    ),
    "logprobs": replace(_GREEDY, logprobs=5),
    "json_schema": replace(
        _GREEDY, constraint=Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(_SCHEMA))
    ),
}
_TEXT = (
    "The lighthouse stood on a narrow spit of rock, and every evening the keeper climbed its "
    "hundred and forty steps to light the lamp. On clear nights the beam reached the islands; in "
    "fog he sounded the horn instead. One autumn a ship did not answer, and in the morning "
)
"""Answers go on with a text, so that some tokens are likelier than others, as ever in use."""
_START_TIMEOUT_S = 300.0
_WARM_STEPS = 5


@dataclass(slots=True)
class StepTimes:
    """Of the decode steps of one batch size, in seconds; one entry per gap between forwards."""

    batch: int
    steps: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    overheads_cpu: list[float] = field(default_factory=list)
    streams_cpu: list[float] = field(default_factory=list)


class TimedRunner:
    """A runner that notes when it is called; implements `StepRunner`."""

    spec: ModelSpec

    def __init__(self, runner: StepRunner, streams_cpu_s: Callable[[], float]) -> None:
        """`streams_cpu_s`: CPU time of the thread that writes to the streams."""
        self.spec = runner.spec
        self.times: StepTimes | None = None
        self._runner = runner
        self._streams_cpu_s = streams_cpu_s
        self._clock = MonotonicClock()
        self._entered: float | None = None
        """When the last step that counts was entered; None if the last one does not."""
        self._left = self._left_cpu = self._streams = 0.0

    def forward(
        self, batch: ForwardBatch, on_layers: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """See `StepRunner`."""
        self._note(batch)
        try:
            return self._runner.forward(batch, on_layers)
        finally:
            self._left, self._left_cpu = self._clock.now(), thread_cpu_s()

    def warm_up(self) -> None:
        """See `StepRunner`."""
        self._runner.warm_up()

    def close(self) -> None:
        """See `StepRunner`."""
        self._runner.close()

    def _note(self, batch: ForwardBatch) -> None:
        now, cpu, streams = self._clock.now(), thread_cpu_s(), self._streams_cpu_s()
        times, entered = self.times, self._entered
        lengths = batch.attention.query_lengths
        counts = times is not None and len(lengths) == times.batch and bool((lengths == 1).all())
        if times is not None and counts and entered is not None:
            times.steps.append(now - entered)
            times.overheads.append(now - self._left)
            times.overheads_cpu.append(cpu - self._left_cpu)
            times.streams_cpu.append(streams - self._streams)
        self._entered, self._streams = now if counts else None, streams


class TimedWorker(WorkerProcess):
    """A worker whose forwards are timed."""

    runner: TimedRunner

    def _load(self, *given: Any) -> StepRunner:
        # The event loop runs already: its thread is the one that writes.
        clock_id = time.pthread_getcpuclockid(_thread_named("grpc-loop"))
        runner = super()._load(*given)
        self.runner = TimedRunner(runner, lambda: time.clock_gettime(clock_id))
        return self.runner


def _thread_named(name: str) -> int:
    (ident,) = [thread.ident for thread in threading.enumerate() if thread.name == name]
    assert ident is not None, f"thread {name} has not started"
    return ident


def main() -> None:
    """Measure the chosen kinds and print a line for each batch."""
    arguments = _parse()
    settings = {
        "workers.both.count": "1",
        "workers.both.threads": str(arguments.threads),
        "workers.prefill.count": "0",
        "workers.decode.count": "0",
        "scheduler.running_max": str(max(arguments.batch)),
    }
    config = load_config(None, {}, settings | dict(arguments.set))
    directory = resolve_model(config.model.path, progress=True)
    config = with_model_directory(config, directory)
    prompts = _prompts(directory, max(arguments.batch), arguments.context)
    worker = TimedWorker(config, WorkerId("both-0"), Role.BOTH)
    try:
        info = worker.start()
        for kind in arguments.kind:
            for batch in arguments.batch:
                own = prompts[:batch]
                times = _measure(worker.runner, info, KINDS[kind], own, arguments.steps)
                record = _record(kind, times)
                text = json.dumps(record) if arguments.json else as_text(record)
                print(text, flush=True)  # noqa: T201
    finally:
        worker.stop()


def _measure(
    runner: TimedRunner,
    info: WorkerInfo,
    sampling: SamplingParams,
    prompts: list[list[int]],
    steps: int,
) -> StepTimes:
    """Answers to all prompts at once; for `steps` steps at least they are together."""
    times = StepTimes(len(prompts))
    # They begin one after the other, a prompt a step.
    sampling = replace(sampling, max_tokens=steps + 2 * len(prompts))
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    requests = _commands(info, sampling, prompts)
    client = spawn.Process(target=_read_answers, args=(info.address, requests, theirs), daemon=True)
    client.start()
    assert ours.poll(_START_TIMEOUT_S), "the client does not start"
    ours.recv()
    runner.times = times
    ours.send(None)
    assert ours.poll(_START_TIMEOUT_S), "the answers do not end"
    problem = ours.recv()
    runner.times = None
    client.join(_START_TIMEOUT_S)
    assert problem is None, problem
    assert len(times.steps) > _WARM_STEPS, f"{len(times.steps)} steps of {len(prompts)} sequences"
    return times


def _prompts(directory: Path, count: int, tokens: int) -> list[list[int]]:
    """Each begins with a number of its own, so that nothing is found in the cache."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [f"{number}. " + _TEXT * (1 + tokens // 32) for number in range(count)]
    return [tokenizer.encode(text).ids[:tokens] for text in texts]


def _commands(info: WorkerInfo, sampling: SamplingParams, prompts: list[list[int]]) -> bytes:
    commands = worker_pb2.AttemptCommands()
    for number, prompt in enumerate(prompts):
        command = commands.commands.add(number=number)
        command.start.timeout_s = _START_TIMEOUT_S
        attempt = command.start.attempt
        attempt.request_id, attempt.attempt = f"{info.incarnation}-{time.time_ns()}-{number}", 1
        attempt.incarnation = info.incarnation
        attempt.prompt.extend(prompt)
        attempt.sampling.CopyFrom(sampling_to_wire(sampling))
    serialized: bytes = commands.SerializeToString()
    return serialized


def _read_answers(address: str, commands: bytes, pipe: Connection) -> None:
    """Another process: have all answers given, read them to their ends, and say how it went."""
    message = worker_pb2.AttemptCommands.FromString(commands)
    left, problem = len(message.commands), None
    ended = threading.Event()

    def said() -> Iterator[worker_pb2.AttemptCommands]:
        yield message
        ended.wait()

    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(_START_TIMEOUT_S)
        pipe.send(None)
        pipe.recv()
        call = worker_pb2_grpc.WorkerStub(channel).Attempts(said(), timeout=_START_TIMEOUT_S)
        for events in call:
            problem = problem or next((error.message for error in events.errors), None)
            left -= len(events.ended) + len(events.errors)
            if left == 0:
                break
        ended.set()
        call.cancel()
    pipe.send(problem)


def _record(kind: str, times: StepTimes) -> dict[str, object]:
    def p50_ms(values: list[float]) -> float:
        return round(1000.0 * statistics.median(values[_WARM_STEPS:]), 3)

    step_ms, overhead_ms = p50_ms(times.steps), p50_ms(times.overheads)
    return {
        "kind": kind,
        "batch": times.batch,
        "step_p50_ms": step_ms,
        "overhead_p50_ms": overhead_ms,
        "overhead_p99_ms": round(1000.0 * percentile(times.overheads[_WARM_STEPS:], 99), 3),
        "share_p50": round(overhead_ms / step_ms, 4),
        "overhead_cpu_p50_ms": p50_ms(times.overheads_cpu),
        "streams_cpu_p50_ms": p50_ms(times.streams_cpu),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.step_overhead", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--set", nargs="*", type=setting, default=[], help="settings of the worker")
    return parser.parse_args()


if __name__ == "__main__":
    main()
