"""A worker without a model: a real gRPC server that answers as its script says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kvferry import convert, convert_views
from kvferry.accounts import HostAccounts, KvAccounts, WorkerLoad
from kvferry.audit_report import AuditReport
from kvferry.error_wire import attempt_error_to_wire
from kvferry.errors import WorkerUnavailable
from kvferry.generation import (
    AttemptFinish,
    AttemptOutput,
    AttemptUsage,
    FinishReason,
    OutputToken,
    SampleProgress,
    TokenLogprobs,
)
from kvferry.ids import AttemptId, Incarnation, WorkerId, new_incarnation
from kvferry.kv_events import KvEventBatch
from kvferry.membership import Role, WorkerInfo
from kvferry.rpc.v1 import worker_pb2, worker_pb2_grpc
from kvferry.tree_view import TreeView

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.errors import KvferryError
    from kvferry.generation import AttemptRequest
    from kvferry.handoff_view import HandoffView
    from kvferry.kv_events import KvEvent
    from kvferry.tree_view import TreeQuery


@dataclass(slots=True)
class Script:
    """How a fake worker answers an attempt."""

    tokens: tuple[int, ...] = ()
    """Empty: echo the prompt."""
    samples: tuple[tuple[int, ...], ...] = ()
    """Tokens of each sample; empty: `tokens` for all of them. They come in turn."""
    reason: FinishReason = FinishReason.STOP
    fail_after: int | None = None
    """End with `fail_with` after this many tokens, of all samples together."""
    tells_ends: bool = False
    """Before that, of samples that are complete."""
    fail_with: KvferryError = field(default_factory=lambda: WorkerUnavailable("scripted failure"))
    hang_after: int | None = None
    """Stop answering, without an end, after this many tokens."""
    logprob: float | None = None
    """Of every token; None reports none."""
    usage: AttemptUsage = field(default_factory=AttemptUsage)
    early_usage: AttemptUsage | None = None
    """Told before the first token."""


@dataclass(eq=False)
class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Serves until `stop`."""

    worker_id: str
    role: Role = Role.BOTH
    incarnation: Incarnation = field(default_factory=new_incarnation)
    script: Callable[[AttemptRequest], Script] = lambda _: Script()
    load: WorkerLoad = field(default_factory=WorkerLoad)
    accounts: KvAccounts = field(
        default_factory=lambda: KvAccounts(10_000, 0, 0, 0, 0, 10_000, 0, 0, 64)
    )
    host_accounts: HostAccounts | None = None
    requests: list[AttemptRequest] = field(default_factory=list)
    cancelled: list[AttemptId] = field(default_factory=list)
    """Attempts that were cancelled, or whose stream ended before they did."""
    streams: int = 0
    """Of attempts, opened so far."""
    ended_samples: list[tuple[AttemptId, int]] = field(default_factory=list)
    """What it was asked to end. It goes on all the same, like one that has not heard yet."""
    subscriptions: int = 0
    status_fails: bool = False
    status_hangs: bool = False
    snapshot_events: tuple[KvEvent, ...] = ()
    violations: tuple[str, ...] = ()
    """What an audit of it finds."""
    audit_fails: bool = False
    counters: dict[str, int] = field(default_factory=dict)
    tree: TreeView = field(default_factory=lambda: TreeView((), 0, (), 0, 0, True))
    tree_queries: list[TreeQuery] = field(default_factory=list)
    handoffs: tuple[HandoffView, ...] = ()
    views_fail: bool = False

    async def start(self) -> WorkerInfo:
        self._held: tuple[int, ...] = ()
        self._sequence = 0
        self._subscribers: list[asyncio.Queue[KvEventBatch]] = []
        self._server: Any = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.info = WorkerInfo(
            WorkerId(self.worker_id), self.role, self.incarnation, f"127.0.0.1:{port}"
        )
        return self.info

    async def stop(self) -> None:
        await self._server.stop(None)

    def emit(self, *events: KvEvent, skip: int = 0) -> None:
        """Publish a batch; `skip` leaves out sequence numbers, as if batches were lost."""
        self._sequence += 1 + skip
        batch = self._batch(False, events)
        for queue in self._subscribers:
            queue.put_nowait(batch)

    def _batch(self, snapshot: bool, events: tuple[KvEvent, ...]) -> KvEventBatch:
        return KvEventBatch(
            WorkerId(self.worker_id), self.incarnation, self._sequence, snapshot, events
        )

    async def Attempts(self, messages: Any, context: Any) -> None:
        self.streams += 1
        exchange = _Exchange(self, context)
        try:
            async for message in messages:
                for command in message.commands:
                    exchange.obey(command)
        finally:
            await exchange.end()

    async def KvEvents(self, message: Any, context: Any) -> None:
        queue: asyncio.Queue[KvEventBatch] = asyncio.Queue()
        queue.put_nowait(self._batch(True, self.snapshot_events))
        self._subscribers.append(queue)
        self.subscriptions += 1
        while True:
            await context.write(convert.kv_batch_to_wire(await queue.get()))

    async def Status(self, message: Any, context: Any) -> Any:
        if self.status_hangs:
            await asyncio.Event().wait()
        if self.status_fails:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
        return worker_pb2.WorkerStatusResponse(
            worker_id=self.worker_id,
            role=self.role.value,
            incarnation=self.incarnation,
            load=convert.load_to_wire(self.load),
            accounts=convert.accounts_to_wire(self.accounts),
            host_accounts=convert.host_accounts_to_wire(self.host_accounts),
            pid=4711,
            counters=self.counters,
        )

    async def Audit(self, message: Any, context: Any) -> Any:
        if self.audit_fails:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
        report = AuditReport(self.violations, self.accounts, 1.5, 42, self.host_accounts)
        return worker_pb2.WorkerAuditResponse(
            incarnation=self.incarnation, report=convert.audit_report_to_wire(report)
        )

    async def Tree(self, message: Any, context: Any) -> Any:
        if self.views_fail:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
        self.tree_queries.append(convert_views.tree_query_from_wire(message))
        return convert_views.tree_view_to_wire(self.tree, self.incarnation)

    async def Handoffs(self, message: Any, context: Any) -> Any:
        if self.views_fail:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
        return convert_views.handoffs_to_wire(self.handoffs, self.incarnation)


class _Exchange:
    """Attempts on one stream, each answered by a task of its own."""

    def __init__(self, fake: FakeWorker, context: Any) -> None:
        self._fake = fake
        self._context = context
        self._ids: dict[int, AttemptId] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._writing = asyncio.Lock()

    def obey(self, command: Any) -> None:
        number = command.number
        match command.WhichOneof("command"):
            case "start":
                request = convert.attempt_request_from_wire(command.start.attempt)
                self._fake.requests.append(request)
                self._ids[number] = request.id
                self._tasks[number] = asyncio.create_task(self._answer(number, request))
            case "cancel":
                self._tasks[number].cancel()
            case "end_sample":
                ended = (self._ids[number], command.end_sample.sample)
                self._fake.ended_samples.append(ended)

    async def end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _answer(self, number: int, request: AttemptRequest) -> None:
        try:
            await self._play(number, self._fake.script(request), request)
        except asyncio.CancelledError:
            self._fake.cancelled.append(request.id)
            raise

    async def _play(self, number: int, script: Script, request: AttemptRequest) -> None:
        tokens = script.tokens or tuple(request.prompt.tolist())
        samples = script.samples or request.sampling.n * (tokens,)
        told = request.resumed or request.sampling.n * (SampleProgress(),)
        turns = [
            (sample, position)
            for position in range(max(map(len, samples)))
            for sample, answer in enumerate(samples)
            if not told[sample].is_done and len(told[sample].token_ids) <= position < len(answer)
        ]
        if script.early_usage is not None:
            await self._say(number, AttemptOutput((), usage=script.early_usage))
        for sample, (progress, answer) in enumerate(zip(told, samples, strict=False)):
            if not progress.is_done and len(progress.token_ids) == len(answer):
                finish = AttemptFinish(script.reason, script.usage)
                await self._say(number, AttemptOutput((), finish, sample=sample))
        for sent, (sample, position) in enumerate(turns):
            if script.fail_after is not None and sent >= script.fail_after:
                break
            if script.hang_after is not None and sent >= script.hang_after:
                await asyncio.Event().wait()
            token = _output_token(samples[sample][position], script.logprob)
            finish = None
            is_last = position + 1 == len(samples[sample])
            whole = script.fail_after is None and script.hang_after is None
            if is_last and (whole or script.tells_ends):
                finish = AttemptFinish(script.reason, script.usage)
            await self._say(number, AttemptOutput((token,), finish, sample=sample))
        if script.hang_after is not None:
            await asyncio.Event().wait()
        events = worker_pb2.AttemptEvents()
        if script.fail_after is None:
            events.ended.append(number)
        else:
            events.errors.append(attempt_error_to_wire(number, script.fail_with))
        await self._write(events)

    async def _say(self, number: int, output: AttemptOutput) -> None:
        message = convert.attempt_output_to_wire(output, number)
        await self._write(worker_pb2.AttemptEvents(outputs=[message]))

    async def _write(self, events: Any) -> None:
        # Not cut short by a cancelled attempt: gRPC takes no other write while one is under way.
        await asyncio.shield(self._write_whole(events))

    async def _write_whole(self, events: Any) -> None:
        async with self._writing:
            await self._context.write(events)


def _output_token(token_id: int, logprob: float | None) -> OutputToken:
    if logprob is None:
        return OutputToken(token_id)
    return OutputToken(token_id, TokenLogprobs(token_id, logprob, ((token_id, logprob),)))
