"""Ends of lanes that say what no real end says. For tests of what the other end does about it."""

from __future__ import annotations

import itertools
import os
import socket
from queue import SimpleQueue

import torch

from kv_transfer.chunk_header import HEADER_BYTES
from kv_transfer.links.gloo import SINK_RANK, SOURCE_RANK, tags_of
from kv_transfer.links.shared_memory import ADDRESS_KEY, BUFFER, GEOMETRY
from kv_transfer.links.shared_ring import new_ring_memory
from kv_transfer.links.unix_stream import dial, listen
from kv_transfer.protocol.messages import Signal


class RogueGlooSource:
    def __init__(self, factory, channel) -> None:
        self._channel = channel
        self._group = factory.connect(channel.store, SOURCE_RANK)
        self._posts = itertools.count()
        self._works = []

    def send(self, header: bytes) -> None:
        """A payload of one byte with that header."""
        seq = next(self._posts)
        payload, trailer = torch.zeros(1, dtype=torch.uint8), bytearray(header)
        tensors = [payload, torch.frombuffer(trailer, dtype=torch.uint8)]
        for tensor, tag in zip(tensors, tags_of(seq), strict=True):
            self._works.append((tensor, self._group.send([tensor], SINK_RANK, tag)))
        if seq == 0:
            self._channel.signal(Signal.SENDING, 0)

    def close(self) -> None:
        self._works.clear()


class RogueGlooSink:
    def __init__(self, factory, channel) -> None:
        self._channel = channel
        self._works = []
        group = factory.connect(channel.store, SINK_RANK)
        for seq in range(3):
            for size, tag in zip((factory.buffer_bytes, HEADER_BYTES), tags_of(seq), strict=True):
                tensor = torch.zeros(size, dtype=torch.uint8)
                self._works.append((tensor, group.recv([tensor], SOURCE_RANK, tag)))
        channel.signal(Signal.CREDIT, 3)

    def credit_too_much(self) -> None:
        self._channel.signal(Signal.CREDIT, 4)

    def close(self) -> None:
        self._works.clear()


class RogueUnixSource:
    def __init__(self, factory, channel) -> None:
        self._socket = dial(channel.store.get(ADDRESS_KEY).decode(), factory.timeout_s)
        self._posts = itertools.count()

    def send(self, header: bytes) -> None:
        buffer = next(self._posts)
        self._socket.sendall(header + BUFFER.pack(buffer))

    def close(self) -> None:
        self._socket.close()


class RogueUnixSink:
    def __init__(self, factory, channel) -> None:
        listener, address = listen(factory.timeout_s)
        channel.store.set(ADDRESS_KEY, address)
        memory = new_ring_memory(3, factory.buffer_bytes)
        self._socket, _ = listener.accept()
        socket.send_fds(self._socket, [GEOMETRY.pack(3, factory.buffer_bytes)], [memory])
        os.close(memory)
        listener.close()

    def credit_too_much(self) -> None:
        self._socket.sendall(BUFFER.pack(0))

    def close(self) -> None:
        self._socket.close()


class RogueMemorySource:
    def __init__(self, factory, channel) -> None:
        self.inbox = SimpleQueue()
        self._peer = factory.receivers[channel.store.get("receiver").decode()]
        self._peer.attach(self)
        self._posts = itertools.count()

    def send(self, header: bytes) -> None:
        self._peer.inbox.put((header, next(self._posts)))

    def close(self) -> None:
        """Nothing is held."""


class RogueMemorySink:
    def __init__(self, factory, channel) -> None:
        self.inbox = SimpleQueue()
        factory.receivers["rogue"] = self
        self.ring = range(3)
        self._senders = SimpleQueue()
        channel.store.set("receiver", "rogue")

    def attach(self, sender) -> None:
        self._senders.put(sender)

    def credit_too_much(self) -> None:
        self._senders.get(timeout=60).inbox.put(0)

    def close(self) -> None:
        """Nothing is held."""
