"""Where processes listen, when the configuration leaves it to the node they run on."""

from __future__ import annotations

AUTO = "auto"
"""As a host of the configuration: the address of the node on which the process runs."""

LOOPBACK = "127.0.0.1"
"""The node's address for whoever runs on no node of a cluster."""

_WILDCARDS = ("0.0.0.0", "::", "[::]")


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of a machine: good to listen at, not to call."""
    return host in _WILDCARDS


def host_to_bind(setting: str, node_address: str) -> str:
    """Where a process listens."""
    return node_address if setting == AUTO else setting


def host_to_announce(setting: str, node_address: str) -> str:
    """Under which others find it."""
    return node_address if is_wildcard(setting) else host_to_bind(setting, node_address)
