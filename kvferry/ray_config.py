"""The settings of clusters on several nodes: which Ray, and what goes where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PlacementStrategy(Enum):
    """On which of the nodes with room a worker is placed. See `cluster.placement`."""

    SPREAD = "spread"
    """Where there are fewest of its role, then fewest of all: one node's end takes least."""
    PACK = "pack"
    """Where there are most already: nodes without any can be given back."""
    PAIR = "pair"
    """Prefill beside decode, pair by pair: their KV stays on the host, or on its GPU links."""


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The running Ray cluster that `kvferry up` uses. `kvferry serve` starts one of its own."""

    address: str = "auto"
    """host:port of its head; auto: RAY_ADDRESS, or the cluster of which this machine is a node."""
    namespace: str = "kvferry"
    """Names of one kvferry cluster: several of them share a Ray cluster under different ones."""


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Where workers go."""

    strategy: PlacementStrategy = PlacementStrategy.SPREAD
    """On which of the nodes with room each one is placed."""
