"""A worker as the router calls it, whose attempts are cut off after a given number of tokens.

All else is real: the worker goes on until it hears of it, as one does that was cut off.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.errors import RequestCancelled, WorkerUnavailable
from router.grpc_worker_client import GrpcWorkerClient

if TYPE_CHECKING:
    from kvferry.generation import AttemptOutput, AttemptRequest
    from kvferry.membership import WorkerInfo
    from router.worker_client import AttemptStream, WorkerClient


@dataclass(slots=True)
class Cuts:
    """What becomes of the next attempts, whichever worker they are sent to."""

    after: deque[int] = field(default_factory=deque)
    """Tokens that each of the next attempts lets pass, of all samples; those beyond pass all."""
    requests: list[AttemptRequest] = field(default_factory=list)

    def connect(self, info: WorkerInfo) -> WorkerClient:
        """For the router."""
        return _CuttingClient(info, self)


class _CuttingClient(GrpcWorkerClient):
    def __init__(self, info: WorkerInfo, cuts: Cuts) -> None:
        super().__init__(info)
        self._cuts = cuts

    def generate(self, request: AttemptRequest, timeout_s: float) -> AttemptStream:
        self._cuts.requests.append(request)
        stream = super().generate(request, timeout_s)
        return _CutStream(stream, self._cuts.after.popleft()) if self._cuts.after else stream


class _CutStream:
    def __init__(self, stream: AttemptStream, tokens: int) -> None:
        self.end_sample = stream.end_sample
        self.abort = stream.abort
        self._stream = stream
        self._left = tokens

    async def read(self) -> AttemptOutput | None:
        if self._left == 0:
            self.abort(RequestCancelled("cut off"))
            raise WorkerUnavailable("cut off")
        output = await self._stream.read()
        if output is None or len(output.tokens) < self._left:
            self._left -= 0 if output is None else len(output.tokens)
            return output
        kept, self._left = output.tokens[: self._left], 0
        return output._replace(tokens=kept, finish=None)
