"""All sessions of one worker: those it opens as a sink and those it serves as a source."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc

from kv_transfer.session import SESSION_CHANNEL_OPTIONS, MessageStream, Session
from kv_transfer.session_links import LinkCensus, LinkSettings
from kvferry.limits import SESSION_CONNECT_TIMEOUT_S, STOP_TIMEOUT_S
from kvferry.rpc.v1 import handoff_pb2_grpc as rpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from kv_transfer.links.interface import LinkFactory
    from kv_transfer.protocol.messages import Hello
    from kvferry.clock import Clock
    from kvferry.generation import PrefillSource
    from kvferry.ids import Incarnation
    from kvferry.rpc.v1 import handoff_pb2 as pb

_LOG = logging.getLogger(__name__)

_CANCEL_S = 0.5
"""For a cancelled call to leave its channel in order."""


class SessionHub:
    """Opens and serves sessions on the loop thread. `connect` and `close` from any thread."""

    def __init__(
        self,
        local: Hello,
        loop: asyncio.AbstractEventLoop,
        post: Callable[[object], None],
        factories: Mapping[str, LinkFactory],
        link_timeout_s: float,
        clock: Clock,
    ) -> None:
        self._local = local
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._sessions: set[Session] = set()
        self._census = LinkCensus()
        self._links = LinkSettings(factories, link_timeout_s, post, clock, self._census)
        self._closed = False

    def connect(self, source: PrefillSource) -> Session:
        """A session with that incarnation of a worker; messages may be sent to it at once."""
        session = self._new_session(source.incarnation)
        self._loop.call_soon_threadsafe(self._start, session, source)
        return session

    async def serve(self, stream: MessageStream) -> bool:
        """Converse with a sink that has called; False, at once, if this worker is stopping."""
        if self._closed:
            return False
        session = self._new_session(None)
        self._sessions.add(session)
        try:
            await session.run(stream)
        finally:
            self._sessions.discard(session)
        return True

    def close(self, reason: str) -> None:
        """End all sessions; later ones end at once."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close_all, reason)

    async def wait_closed(self) -> None:
        """On the loop: until the opened sessions and all link threads have ended, or time is up.

        A thread that is still inside torch while the interpreter ends would abort the process.
        """
        try:
            # Half of what stopping a worker may take: the rest of it has to end as well.
            async with asyncio.timeout(STOP_TIMEOUT_S / 2):
                while self._tasks:
                    await asyncio.wait(set(self._tasks))
                await self._census.all_ended()
        except TimeoutError:
            _LOG.warning("a session or link is held by its peer; leaving it behind")
            await self._cancel_calls()

    async def _cancel_calls(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_CANCEL_S)

    def _new_session(self, expected: Incarnation | None) -> Session:
        return Session(self._local, expected=expected, loop=self._loop, links=self._links)

    def _close_all(self, reason: str) -> None:
        self._closed = True
        for session in self._sessions:
            session.close(reason)

    def _start(self, session: Session, source: PrefillSource) -> None:
        if self._closed:
            session.lost("the worker is stopping")
            return
        self._sessions.add(session)
        task = self._loop.create_task(self._call(session, source))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, session: Session, source: PrefillSource) -> None:
        try:
            async with grpc.aio.insecure_channel(
                source.address, options=SESSION_CHANNEL_OPTIONS
            ) as channel:
                try:
                    async with asyncio.timeout(SESSION_CONNECT_TIMEOUT_S):
                        await channel.channel_ready()
                except TimeoutError:
                    session.lost(
                        f"no connection to worker {source.worker_id} at {source.address}"
                        f" within {SESSION_CONNECT_TIMEOUT_S:g} s"
                    )
                    return
                call = rpc.HandoffStub(channel).Session()
                try:
                    await session.run(call)
                finally:
                    call.cancel()
        finally:
            session.lost("the conversation was cancelled")
            self._sessions.discard(session)


class HandoffServicer(rpc.HandoffServicer):
    """The gRPC service of the source's side, for the worker's server."""

    def __init__(self, hub: SessionHub) -> None:
        self._hub = hub

    async def Session(  # the name is gRPC's
        self,
        request_iterator: AsyncIterator[pb.HandoffBatch],
        context: grpc.aio.ServicerContext[pb.HandoffBatch, pb.HandoffBatch],
    ) -> None:
        """Serve one sink until either side ends it."""
        del request_iterator  # read through the context, like the client's end
        if not await self._hub.serve(context):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is stopping")
