"""The settings of the router: where it listens, whom it serves, how it chooses workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvferry.addresses import AUTO

ADMIN_TENANT = "admin"
"""The operator: whoever shows one of its keys may do everything."""
API_KEY_VARIABLE = "KVFERRY_API_KEY"
"""Where clients have theirs. Not a flag: everybody on a machine sees those of every process."""


class PolicyName(Enum):
    """How the router chooses the worker that computes a prompt (docs/router-policies.md)."""

    PRICED_TIME = "priced_time"
    """Least predicted time, with a price on what its copies cost the other requests."""
    MIN_TTFT = "min_ttft"
    """Least predicted time of the request alone."""
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LEAST_LOADED = "least_loaded"
    """Fewest requests in flight."""
    CONSISTENT_HASHING = "consistent_hashing"
    """By the first 256 tokens, with bounded loads."""
    APPROXIMATE_TREE = "approximate_tree"
    """Longest prefix sent there before, unless loads differ much. Needs no events."""
    OVERLAP_LOGIT = "overlap_logit"
    """Hit ratio less KV in use less share of requests."""
    BLOCK_COST = "block_cost"
    """Fewest tokens queued, to be computed and in use."""


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The OpenAI HTTP API."""

    port: int = 0
    """0: the port after that of gRPC."""


@dataclass(frozen=True, slots=True)
class ConsoleConfig:
    """The web console, at the port of the HTTP API."""

    enabled: bool = True
    """Serve it, below /console/."""


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may call, and how the connection is protected. For gRPC and HTTP alike."""

    tls_certificate: str = ""
    """A PEM file with the server's chain. Empty: no TLS."""
    tls_key: str = ""
    """Its private key."""
    tls_client_ca: str = ""
    """Clients must show a certificate signed by this authority. Empty: they need none."""
    api_keys: str = ""
    """A file with one `tenant: key` per line. Empty: anybody may call."""


@dataclass(frozen=True, slots=True)
class SmgConfig:
    """A further gRPC port for the smg gateway, which shows no key and no certificate."""

    port: int = 0
    """0: there is none. Whoever reaches it may ask, whatever `router.security` says."""
    host: str = "127.0.0.1"
    """Address that it binds: one that only the gateway reaches."""
    tenant: str = "smg"
    """On whose account its requests go."""


@dataclass(frozen=True, slots=True)
class ServiceClassConfig:
    """One class of service."""

    queue_max: int = 256
    """Requests of this class that may wait for a place; more are refused."""
    ttft_limit_s: float = 0.0
    """A request whose first token is predicted to come later is refused at once. 0: no limit."""
    weight: float = 1.0
    """Share of the places under load, beside the weights of the other classes that wait."""


@dataclass(frozen=True, slots=True)
class ServiceClassesConfig:
    """The classes that a request can be of."""

    interactive: ServiceClassConfig = ServiceClassConfig(weight=4.0)
    standard: ServiceClassConfig = ServiceClassConfig(weight=2.0)
    batch: ServiceClassConfig = ServiceClassConfig(weight=1.0)


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """What each tenant may use."""

    concurrent_max: int = 0
    """Requests in flight. 0: no limit."""
    requests_per_minute: float = 0.0
    """0: no limit."""
    tokens_per_minute: float = 0.0
    """Prompt tokens and answer tokens. 0: no limit."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The front door."""

    replicas: int = 1
    """How many routers to keep running, on different nodes where there are several."""
    resources: dict[str, float] = field(default_factory=dict)
    """Resources of Ray that each reserves under `kvferry up`, such as `{router_pod: 1}`: it runs
    where a node has them, and waits where none has any left."""
    host: str = AUTO
    """Address that a router binds. auto: that of the Ray node it runs on, which is 127.0.0.1 under
    `kvferry serve`."""
    port: int = 50051
    """0 takes a free port. Of routers on one node each further one takes the next two ports."""
    http: HttpConfig = field(default_factory=HttpConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    smg: SmgConfig = field(default_factory=SmgConfig)
    policy: PolicyName = PolicyName.PRICED_TIME
    """How the worker that computes a prompt is chosen."""
    requests_max: int = 512
    """Most requests given to workers at once; as many as the workers decode together, if fewer."""
    request_timeout_s: float = 600.0
    """Longest life of a request whose client sets no deadline."""
    stop_grace_s: float = 5.0
    """For running requests to end when the router stops; the others get an error then."""
    status_interval_s: float = 0.5
    """How often the router asks each worker for its load."""
    classes: ServiceClassesConfig = field(default_factory=ServiceClassesConfig)
    tenants: TenantConfig = field(default_factory=TenantConfig)
