"""What a simulated cluster is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.config import EvictionPolicy
from kvferry.errors import ConfigError
from kvferry.kv_events import event_block_tokens
from kvferry.router_config import PolicyName, ServiceClassesConfig, TenantConfig

if TYPE_CHECKING:
    from kvferry.config import ClusterConfig
    from kvferry.ids import WorkerId


@dataclass(frozen=True, slots=True)
class Places:
    """What a worker takes into a step."""

    page_tokens: int
    chunk_tokens: int
    running_max: int


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A process that is killed."""

    worker_id: WorkerId
    at_s: float
    back_after_s: float | None = None
    """When another one takes its place, which holds nothing; None: never."""


@dataclass(frozen=True, slots=True)
class SimSettings:
    """A cluster. Names as of `kvferry.config` where there are such."""

    prefill: int = 1
    """Workers that compute prompts for others..."""
    decode: int = 1
    """...that decode what these computed..."""
    both: int = 0
    """...and that decode what they computed themselves."""
    workers_per_host: int = 1
    """Who slows one another down: so many of them, in the order above."""
    page_size: int = 16
    kv_tokens: int = 1_000_000
    """Of each worker."""
    chunk_tokens: int = 2048
    running_max: int = 64
    rows: int = 128
    output_reserve: float = 0.25
    eviction: EvictionPolicy = EvictionPolicy.LRU
    policy: PolicyName = PolicyName.PRICED_TIME
    routers: int = 1
    requests_max: int = 512
    status_interval_s: float = 0.5
    local_prefill_tokens_max: int = 0
    event_delay_s: float = 0.01
    """From a change of a cache until routers know of it."""
    event_loss: float = 0.0
    """Share of the batches of events that a router misses; a snapshot repairs it."""
    missed_after_s: float = 0.5
    """From the death of a worker until routers know of it."""
    classes: ServiceClassesConfig = field(default_factory=ServiceClassesConfig)
    tenants: TenantConfig = field(default_factory=TenantConfig)
    seed: int = 0

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be simulated."""
        least_one = {
            "page_size": self.page_size,
            "kv_tokens": self.kv_tokens,
            "chunk_tokens": self.chunk_tokens,
            "running_max": self.running_max,
            "rows": self.rows,
            "routers": self.routers,
            "workers_per_host": self.workers_per_host,
        }
        for name, value in least_one.items():
            if value < 1:
                raise ConfigError(name, f"is {value}; at least 1")
        if self.decode + self.both < 1:
            raise ConfigError("decode", "is 0 and so is both: nobody would decode")
        if self.prefill and not self.decode:
            raise ConfigError("prefill", "computes for workers that decode, of which there is none")
        if event_block_tokens(self.page_size) != self.page_size:
            raise ConfigError(
                "page_size", f"is {self.page_size}; simulated are pages of 16 and more"
            )
        if not 0.0 <= self.event_loss < 1.0:
            raise ConfigError("event_loss", f"is {self.event_loss}; a share below 1")

    @staticmethod
    def of(config: ClusterConfig, kv_bytes_per_token: int) -> SimSettings:
        """The cluster of a configuration."""
        return SimSettings(
            prefill=config.workers.prefill.count,
            decode=config.workers.decode.count,
            both=config.workers.both.count,
            page_size=config.cache.page_size,
            kv_tokens=config.cache.memory_bytes // kv_bytes_per_token,
            chunk_tokens=config.scheduler.chunk_tokens,
            running_max=config.scheduler.running_max,
            rows=config.cache.rows,
            output_reserve=config.scheduler.output_reserve,
            eviction=config.cache.eviction,
            policy=config.router.policy,
            routers=config.router.replicas,
            requests_max=config.router.requests_max,
            status_interval_s=config.router.status_interval_s,
            local_prefill_tokens_max=config.handoff.local_prefill_tokens_max,
            classes=config.router.classes,
            tenants=config.router.tenants,
        )

    @property
    def places(self) -> Places:
        """Of each worker."""
        return Places(self.page_size, self.chunk_tokens, self.running_max)
