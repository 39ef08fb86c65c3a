"""Which transport two workers use, and what each of them has.

| transport | between |
|---|---|
| nccl | workers whose KV is on CUDA devices |
| shared_memory | processes of one user on one host, in one network namespace |
| gloo | all others, through host memory |

The source chooses, from both greetings; the sink's end opens what the source's first entry in the
rendezvous store names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kv_transfer.links.gloo import GlooLinkFactory
from kv_transfer.links.nccl import NcclLinkFactory
from kv_transfer.links.shared_memory import SharedMemoryLinkFactory
from kvferry.config import TransportChoice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_transfer.links.interface import LinkFactory
    from kv_transfer.protocol.messages import Hello
    from kvferry.config import HandoffConfig

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")

_CUDA = "cuda"


def host_fingerprint(config: HandoffConfig, *, on_cuda: bool = False) -> str:
    """For `Hello.host`: equal for two workers that can share memory; empty for one that shall not.

    Shared memory needs the same kernel, the network namespace in which the sink's address is
    found, and the same user. Workers with their KV on a CUDA device all say the same.
    """
    if config.transport is TransportChoice.GLOO:
        return ""
    if on_cuda:
        return _CUDA
    # The namespace's link reads like net:[4026531833].
    parts = (_BOOT_ID.read_text().strip(), os.readlink(_NETWORK), f"uid:{os.geteuid()}")
    return "/".join(parts)


def choose_transport(source: Hello, sink: Hello) -> str:
    """The name of the transport between two workers."""
    if not source.host or source.host != sink.host:
        return "gloo"
    return "nccl" if source.host == _CUDA else "shared_memory"


def build_factories(
    config: HandoffConfig, link_host: str, *, on_cuda: bool = False
) -> Mapping[str, LinkFactory]:
    """Every transport of this worker by its name."""
    timeout_s, buffers = config.link_timeout_s, config.staging_buffers
    buffer_bytes = config.staging_buffer_bytes
    gloo = GlooLinkFactory(link_host, timeout_s, buffers, buffer_bytes)
    if on_cuda:
        return {"gloo": gloo, "nccl": NcclLinkFactory(timeout_s, buffers, buffer_bytes)}
    shared_memory = SharedMemoryLinkFactory(timeout_s, buffers, buffer_bytes)
    return {"gloo": gloo, "shared_memory": shared_memory}
