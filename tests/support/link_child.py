"""One end of a lane in a process of its own, to be killed or stopped by a test.

`python -m tests.support.link_child TRANSPORT source|sink FD`: entries, signals and orders travel as
pickled tuples on the connection with that descriptor.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kv_transfer.links.gloo import GlooLinkFactory
from kv_transfer.links.shared_memory import SharedMemoryLinkFactory
from kvferry.config import KvDType
from mem_cache.layout import KvLayout
from tests.support.lanes import Channel, SinkSide, SourceSide

ROOT = Path(__file__).parents[2]
MIB = 2**20
LAYOUT = KvLayout(num_layers=4, num_kv_heads=4, head_dim=64, dtype=KvDType.FLOAT32, page_size=4)
"""8 KiB a token."""
BUFFERS, BUFFER_BYTES, TIMEOUT_S = 4, 4 * MIB, 5.0
TOKENS = 4000
START_S = 60.0


def new_factory(transport: str):
    if transport == "gloo":
        return GlooLinkFactory("127.0.0.1", TIMEOUT_S, BUFFERS, BUFFER_BYTES)
    return SharedMemoryLinkFactory(TIMEOUT_S, BUFFERS, BUFFER_BYTES)


class RemoteLane:
    """One end here; the channel to the other one goes over a connection."""

    def __init__(self, transport: str, role: str, connection: Connection) -> None:
        torch.set_num_threads(1)
        self.side = (
            SourceSide(BUFFER_BYTES, LAYOUT, TOKENS)
            if role == "source"
            else SinkSide(LAYOUT, TOKENS)
        )
        self.connection = connection
        self._lock = threading.Lock()
        channel = self.channel = Channel(TIMEOUT_S)
        channel.publish = lambda key, value: self.tell("put", key, value)
        channel.lead_to(lambda signal, value: self.tell("signal", signal, value))
        self.side.open(new_factory(transport), f"remote-{role}", channel)

    def tell(self, *message) -> None:
        # The other process may have been killed.
        with self._lock, contextlib.suppress(OSError):
            self.connection.send(message)

    def listen(self) -> None:
        """Until the other process ends."""
        try:
            while True:
                kind, *rest = self.connection.recv()
                if kind == "put":
                    self.channel.store.put(*rest)
                elif kind == "signal":
                    self.side.end.on_signal(*rest)
                else:
                    self.send_for_ever()
        except (EOFError, ConnectionError):
            return

    def send_for_ever(self) -> None:
        """Keep the lane busy with streams that the sink does not know, and drops."""
        threading.Thread(target=self._send_for_ever, daemon=True).start()

    def _send_for_ever(self) -> None:
        self.side.submit(1, TOKENS)
        while (report := self.side.reports.queue.get())[0] != "failed":
            if report[0] == "sent" and report[1].region.token_stop == TOKENS:
                self.side.submit(1, TOKENS)


def start_child(transport: str, role: str) -> tuple[subprocess.Popen, Connection]:
    here, there = Pipe()
    command = [sys.executable, "-m", "tests.support.link_child", transport, role]
    child = subprocess.Popen([*command, str(there.fileno())], cwd=ROOT, pass_fds=[there.fileno()])
    there.close()
    # It imports torch first; building, which has a deadline, begins afterwards.
    if not here.poll(START_S):
        child.kill()
        raise TimeoutError(f"no child within {START_S:g} s")
    assert here.recv() == "ready"
    return child, here


def main() -> None:
    transport, role, fd = sys.argv[1:]
    connection = Connection(int(fd))
    connection.send("ready")
    RemoteLane(transport, role, connection).listen()


if __name__ == "__main__":
    main()
