"""A worker without a model: a real gRPC server that answers as its script says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kvferry import convert
from kvferry.accounts import HostAccounts, KvAccounts, WorkerLoad
from kvferry.audit_report import AuditReport
from kvferry.generation import (
    AttemptFinish,
    AttemptOutput,
    AttemptUsage,
    FinishReason,
    OutputToken,
    TokenLogprobs,
)
from kvferry.ids import Attempt, AttemptId, Incarnation, RequestId, WorkerId, new_incarnation
from kvferry.kv_events import KvEventBatch
from kvferry.membership import Role, WorkerInfo
from kvferry.rpc.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.generation import AttemptRequest
    from kvferry.kv_events import KvEvent


@dataclass(slots=True)
class Script:
    """How a fake worker answers `Generate`."""

    tokens: tuple[int, ...] = ()
    """Empty: echo the prompt."""
    samples: tuple[tuple[int, ...], ...] = ()
    """Tokens of each sample; empty: `tokens` for all of them. They come in turn."""
    reason: FinishReason = FinishReason.STOP
    fail_after: int | None = None
    """Abort with `fail_code` after this many tokens, of all samples together."""
    fail_code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    fail_trailing: tuple[tuple[str, str], ...] = ()
    hang_after: int | None = None
    """Stop answering, without ending the call, after this many tokens."""
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
    """Attempts whose call was cancelled."""
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

    async def Generate(self, message: Any, context: Any) -> None:
        request = convert.attempt_request_from_wire(message)
        self.requests.append(request)
        script = self.script(request)
        tokens = script.tokens or tuple(request.prompt.tolist())
        samples = script.samples or request.sampling.n * (tokens,)
        turns = [
            (sample, position)
            for position in range(max(map(len, samples)))
            for sample, answer in enumerate(samples)
            if position < len(answer)
        ]
        try:
            if script.early_usage is not None:
                early = AttemptOutput((), usage=script.early_usage)
                await context.write(convert.attempt_output_to_wire(early))
            for sent, (sample, position) in enumerate(turns):
                if script.fail_after is not None and sent >= script.fail_after:
                    break
                if script.hang_after is not None and sent >= script.hang_after:
                    await asyncio.Event().wait()
                token = _output_token(samples[sample][position], script.logprob)
                finish = None
                is_last = position + 1 == len(samples[sample])
                if is_last and script.fail_after is None and script.hang_after is None:
                    finish = AttemptFinish(script.reason, script.usage)
                output = AttemptOutput((token,), finish, sample=sample)
                await context.write(convert.attempt_output_to_wire(output))
            if script.hang_after is not None:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        if script.fail_after is not None:
            await context.abort(script.fail_code, "scripted failure", script.fail_trailing)

    async def EndSample(self, message: Any, context: Any) -> Any:
        attempt_id = AttemptId(RequestId(message.request_id), Attempt(message.attempt))
        self.ended_samples.append((attempt_id, message.sample))
        return worker_pb2.EndSampleResponse()

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


def _output_token(token_id: int, logprob: float | None) -> OutputToken:
    if logprob is None:
        return OutputToken(token_id)
    return OutputToken(token_id, TokenLogprobs(token_id, logprob, ((token_id, logprob),)))
