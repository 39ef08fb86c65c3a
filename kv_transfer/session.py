"""One session: the control messages between two workers, on a bidirectional gRPC stream.

The sink's worker opens it; the source's worker serves it. Everything here runs on the loop thread
except `send`, `close`, `open_link` and `close_link`, which any thread may call and which never
block.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

import grpc

from kv_transfer.events import LinkFailed, MessageCame, SessionLost, SessionOpened
from kv_transfer.incoming import ReceiveDesk
from kv_transfer.protocol.errors import IllegalEvent
from kv_transfer.protocol.lanes import lanes_between
from kv_transfer.protocol.messages import (
    Hello,
    LinkDown,
    LinkRendezvous,
    LinkSignal,
    SessionMessage,
)
from kv_transfer.protocol.states import SESSION_TRANSITIONS, SessionEvent, SessionState
from kv_transfer.session_links import LinkSettings, SessionLinks
from kv_transfer.wire import batch_from_wire, batch_to_wire
from kvferry.errors import KvferryError, WorkerUnavailable
from kvferry.limits import SESSION_CONNECT_TIMEOUT_S, WORKER_MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.outgoing import SendQueue
    from kv_transfer.protocol.lanes import Lane
    from kvferry.ids import Incarnation
    from kvferry.rpc.v1 import handoff_pb2 as pb

_LOG = logging.getLogger(__name__)

SESSION_OUTBOX_MAX = 8192
"""Messages queued for a peer that does not read; beyond it the session is given up. 64 requests
of 3,000 tokens in chunks of 91 tokens are 2,100 headers."""

_BATCH_MAX = 32
"""Messages written at once. The longest ones are prompts: 32 of 500,000 tokens fit a message."""

_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 4000),
    # What counts since gRPC has a timeout for every ping; its default is a minute.
    ("grpc.http2.ping_timeout_ms", 4000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SESSION_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_KEEPALIVE,
    # A connection of its own: no backoff inherited from an earlier session to the same address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", WORKER_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", WORKER_MESSAGE_BYTES_MAX),
)

SESSION_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", WORKER_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", WORKER_MESSAGE_BYTES_MAX),
)
"""For the worker's gRPC server; without them it refuses the client's keepalive pings."""


class MessageStream(Protocol):
    """Either end of the gRPC stream."""

    async def read(self) -> pb.HandoffBatch | object:
        """The next messages, or `grpc.aio.EOF`."""
        ...

    async def write(self, batch: pb.HandoffBatch) -> None:
        """Send, waiting for flow control."""
        ...


class Session:
    """One stream with one incarnation of a peer. Posts `SessionLost` exactly once, last."""

    def __init__(
        self,
        local: Hello,
        *,
        expected: Incarnation | None,
        loop: asyncio.AbstractEventLoop,
        links: LinkSettings,
    ) -> None:
        """`expected`: the source's incarnation where we are the sink; None where we serve."""
        self.state = SessionState.CONNECTING
        self.is_source = expected is None
        """Whether this worker computes the prompts of this session."""
        self._local = local
        self._expected = expected
        self._loop = loop
        self._post = links.post
        self._outbox: asyncio.Queue[SessionMessage] = asyncio.Queue()
        self._closing = asyncio.Event()
        self._close_reason = "closed here"
        self.lanes: tuple[Lane, ...] = ()
        """Written once, before `SessionOpened` is posted."""
        self.desk = ReceiveDesk()
        """Where the payloads of this session go, if we are its sink."""
        self._links = SessionLinks(self, self.desk, links)

    # --- any thread ---

    def send(self, message: SessionMessage) -> None:
        """Queue a message, in order. On a lost session it goes nowhere, like any late message."""
        self.on_loop(self._enqueue, message)

    def close(self, reason: str) -> None:
        """End the session."""
        self.on_loop(self._close, reason)

    def open_link(self, generation: int, transport: str, queues: Sequence[SendQueue]) -> None:
        """Start the sending ends of a link generation, one per lane."""
        self.on_loop(self._links.open_senders, generation, transport, queues)

    def close_link(self, generation: int, reason: str) -> None:
        """End that link generation, and tell the peer."""
        self.on_loop(self._links.close_generation, generation, reason)

    def on_loop(self, function: Callable[..., None], *args: object) -> None:
        """Call `function` on the loop thread, in order."""
        if self._loop.is_closed():
            _LOG.debug("session used after its loop has ended")
            return
        self._loop.call_soon_threadsafe(function, *args)

    # --- loop thread ---

    def send_at_once(self, message: SessionMessage) -> None:
        """As `send`, but before everything that other threads are sending now."""
        self._enqueue(message)

    def link_ended(self, generation: int, reason: str) -> None:
        """A link generation has ended by itself: tell the peer and the engine."""
        self._enqueue(LinkDown(generation, reason))
        self._post(LinkFailed(self, generation, reason))

    async def run(self, stream: MessageStream) -> None:
        """Converse until either side ends it."""
        reason = "the conversation was cancelled"
        try:
            self._advance(SessionEvent.CONNECTED)
            reason = await self._converse(stream)
        except TimeoutError:
            reason = f"no greeting within {SESSION_CONNECT_TIMEOUT_S:g} s"
        except grpc.RpcError as error:
            reason = _rpc_reason(error)
        except asyncio.InvalidStateError as error:
            # What gRPC says of a write to a call that has just ended.
            reason = f"the stream has ended: {error}"
        except KvferryError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001  # outermost frame: it ends with the reason
            _LOG.exception("session failed")
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.lost(reason)

    def lost(self, reason: str) -> None:
        """The stream has ended, or never began."""
        if self.state is SessionState.LOST:
            return
        self._advance(SessionEvent.BROKEN)
        self._links.session_lost(f"session lost: {reason}")
        self._post(SessionLost(self, reason))

    async def _converse(self, stream: MessageStream) -> str:
        async with asyncio.timeout(SESSION_CONNECT_TIMEOUT_S):
            await stream.write(batch_to_wire([self._local]))
            greeting = batch_from_wire(await stream.read())
        self._greeted(greeting)
        tasks = [
            asyncio.create_task(self._read_all(stream)),
            asyncio.create_task(self._write_all(stream)),
            asyncio.create_task(self._wait_closed()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return next(iter(done)).result()

    def _greeted(self, greeting: list[SessionMessage] | None) -> None:
        if not greeting:
            raise WorkerUnavailable("the peer closed the session without a greeting")
        hello = greeting[0]
        if not isinstance(hello, Hello) or len(greeting) > 1:
            names = ", ".join(type(message).__name__ for message in greeting)
            raise WorkerUnavailable(f"the peer began with {names}, not with Hello alone")
        if self._expected is not None and hello.incarnation != self._expected:
            raise WorkerUnavailable(
                f"worker {hello.worker_id} is incarnation {hello.incarnation:x},"
                f" not {self._expected:x}"
            )
        if hello.layout_hash != self._local.layout_hash:
            raise WorkerUnavailable(
                f"KV layout {hello.layout_hash} of worker {hello.worker_id} is not"
                f" that of {self._local.worker_id}, {self._local.layout_hash}"
            )
        self.lanes = self._lanes_with(hello)
        self._links.expect_lanes(len(self.lanes))
        self._advance(SessionEvent.GREETED)
        self._post(SessionOpened(self, hello))

    def _lanes_with(self, peer: Hello) -> tuple[Lane, ...]:
        ranks, heads = peer.ranks, self._local.heads
        if ranks < 1 or heads % ranks:
            raise WorkerUnavailable(f"worker {peer.worker_id} has {heads} heads on {ranks} ranks")
        source, sink = (self._local, peer) if self.is_source else (peer, self._local)
        return lanes_between(source.ranks, sink.ranks, heads)

    async def _read_all(self, stream: MessageStream) -> str:
        while True:
            messages = batch_from_wire(await stream.read())
            if messages is None:
                return "the peer ended the session"
            for message in messages:
                # The engine hears of it first: what a link reports about it comes later.
                self._post(MessageCame(self, message))
                if isinstance(message, LinkRendezvous | LinkSignal | LinkDown):
                    self._links.on_message(message)

    async def _write_all(self, stream: MessageStream) -> str:
        while True:
            messages = [await self._outbox.get()]
            while len(messages) < _BATCH_MAX and not self._outbox.empty():
                messages.append(self._outbox.get_nowait())
            await stream.write(batch_to_wire(messages))

    async def _wait_closed(self) -> str:
        await self._closing.wait()
        return self._close_reason

    def _enqueue(self, message: SessionMessage) -> None:
        if self._outbox.qsize() >= SESSION_OUTBOX_MAX:
            self._close(f"the peer has left {SESSION_OUTBOX_MAX} messages unread")
        elif self.state is not SessionState.LOST:
            self._outbox.put_nowait(message)

    def _close(self, reason: str) -> None:
        if not self._closing.is_set():
            self._close_reason = reason
            self._closing.set()

    def _advance(self, event: SessionEvent) -> None:
        target = SESSION_TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalEvent("session", self.state.value, event.value)
        self.state = target


def _rpc_reason(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
