"""Which transport a session uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.links.gloo import GlooLinkFactory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_transfer.links.interface import LinkFactory
    from kv_transfer.protocol.messages import Hello
    from kvferry.config import HandoffConfig


def host_fingerprint(config: HandoffConfig) -> str:
    """Equal for two workers that can share memory; empty if this one shall not."""
    del config
    return ""


def choose_transport(source: Hello, sink: Hello) -> str:
    """The name of the transport between two workers."""
    return "shared_memory" if source.host and source.host == sink.host else "gloo"


def build_factories(config: HandoffConfig, link_host: str) -> Mapping[str, LinkFactory]:
    """Every transport of this worker by its name."""
    gloo = GlooLinkFactory(
        link_host, config.link_timeout_s, config.staging_buffers, config.staging_buffer_bytes
    )
    return {"gloo": gloo}
