"""What each tenant uses, and whether it may use more. Pure; the time is told.

A tenant's allowance of a minute is a bucket that holds at most that and fills evenly: in any t
seconds it may use one minute's worth and what flows in meanwhile. Tokens are taken when a request
is accepted, for its prompt and its longest answer, and what it did not use comes back at its end;
so no bucket is ever overdrawn.

Who had no request until its buckets are full again, a minute, is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvferry.errors import InvalidInput
from kvferry.limits import TENANT_CHARACTERS_MAX, TENANTS_REMEMBERED_MAX
from router.recent_mean import RecentMean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvferry.router_config import TenantConfig

_MINUTE_S = 60.0
_UNKNOWN_HOLD_S = 1.0
"""Until the first request has ended."""


class RefusalReason(Enum):
    """Which limit a request met."""

    QUEUE_FULL = "queue_full"
    TTFT_LIMIT = "ttft_limit"
    TENANT_CONCURRENT = "tenant_concurrent"
    TENANT_REQUESTS = "tenant_requests"
    TENANT_TOKENS = "tenant_tokens"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken now, and when it is worth asking again."""

    reason: RefusalReason
    what: str
    retry_after_s: float


class Bucket:
    """An allowance per minute."""

    def __init__(self, per_minute: float, now: float) -> None:
        """`per_minute` > 0. Full at first. One unit always fits, however slowly it comes."""
        self.size = max(1.0, per_minute)
        self._per_s = per_minute / _MINUTE_S
        self._level = self.size
        self._as_of = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` <= `size` can be taken; 0: now."""
        self._fill(now)
        return max(0.0, amount - self._level) / self._per_s

    def take(self, amount: float, now: float) -> None:
        """Take what can be taken now."""
        self._fill(now)
        assert amount <= self._level + 1e-6, "a bucket is never overdrawn"
        self._level = max(0.0, self._level - amount)

    def give_back(self, amount: float, now: float) -> None:
        """What was taken and not used."""
        self._fill(now)
        self._level = min(self.size, self._level + amount)

    def _fill(self, now: float) -> None:
        self._level = min(self.size, self._level + (now - self._as_of) * self._per_s)
        self._as_of = now


USUAL_S = 10.0
"""What counts as late in means of places."""


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's account."""

    name: str
    requests_bucket: Bucket | None
    tokens_bucket: Bucket | None
    active_at: float
    requests: int = 0
    """Accepted and not ended, waiting ones among them."""
    sequences: int = 0
    """Places that its running requests hold."""
    usual_sequences: RecentMean = field(default_factory=lambda: RecentMean(USUAL_S))
    """How many they were of late."""
    told_until: float = 0.0
    """When the last one of those is to ask again that were refused for lack of room."""


class TenantBook:
    """All tenants that have been here within the last minute."""

    def __init__(self, config: TenantConfig, remembered_max: int = TENANTS_REMEMBERED_MAX) -> None:
        self._config = config
        self._remembered_max = remembered_max
        slowest = min(config.requests_per_minute or 1.0, config.tokens_per_minute or 1.0, 1.0)
        self._forget_after_s = _MINUTE_S / slowest
        """In which every bucket fills."""
        self.active = 0
        """Tenants that have requests here."""
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()
        """The one that was active last comes last."""

    def __len__(self) -> int:
        return len(self._tenants)

    def find(self, name: str, now: float) -> Tenant:
        """The account of a tenant. Raises `InvalidInput` for a name that is too long."""
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(name) > TENANT_CHARACTERS_MAX:
                problem = f"has {len(name)} characters; at most {TENANT_CHARACTERS_MAX}"
                raise InvalidInput("tenant", problem)
            requests, tokens = self._config.requests_per_minute, self._config.tokens_per_minute
            tenant = Tenant(
                name,
                Bucket(requests, now) if requests else None,
                Bucket(tokens, now) if tokens else None,
                now,
            )
            self._tenants[name] = tenant
        self._touch(tenant, now)
        return tenant

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def known(self, name: str) -> Tenant:
        """The account of a tenant that has a request."""
        return self._tenants[name]

    def enter(self, tenant: Tenant, now: float, hold_s: float | None) -> Refusal | None:
        """Count a request of `tenant`, unless it has too many. `hold_s` is how long one lasts."""
        most, bucket = self._config.concurrent_max, tenant.requests_bucket
        if most and tenant.requests >= most:
            return Refusal(
                RefusalReason.TENANT_CONCURRENT,
                f"the tenant has {most} requests in flight already",
                (_UNKNOWN_HOLD_S if hold_s is None else hold_s) / most,
            )
        wait_s = bucket.wait_s(1.0, now) if bucket is not None else 0.0
        if bucket is not None and wait_s > 0.0:
            allowed = f"{self._config.requests_per_minute:g} requests a minute"
            what = f"the tenant has used its {allowed}"
            return Refusal(RefusalReason.TENANT_REQUESTS, what, wait_s)
        if bucket is not None:
            bucket.take(1.0, now)
        self.active += tenant.requests == 0
        tenant.requests += 1
        self._touch(tenant, now)
        return None

    def take_tokens(self, tenant: Tenant, tokens: int, now: float) -> Refusal | None:
        """Take the tokens of a request, unless they are not there.

        Raises `InvalidInput` when they never will be.
        """
        bucket = tenant.tokens_bucket
        if bucket is None:
            return None
        allowed = f"{self._config.tokens_per_minute:g} tokens a minute"
        if tokens > bucket.size:
            problem = f"prompt and answers of up to {tokens} tokens; the tenant has {allowed}"
            raise InvalidInput("sampling.max_tokens", problem)
        wait_s = bucket.wait_s(tokens, now)
        if wait_s > 0.0:
            what = f"the tenant has used its {allowed}"
            return Refusal(RefusalReason.TENANT_TOKENS, what, wait_s)
        bucket.take(tokens, now)
        return None

    def leave(self, tenant: Tenant, unused_tokens: int, now: float) -> None:
        """A request that was counted has ended."""
        assert tenant.requests > 0, "a request ends once"
        tenant.requests -= 1
        self.active -= tenant.requests == 0
        if tenant.tokens_bucket is not None:
            tenant.tokens_bucket.give_back(unused_tokens, now)
        self._touch(tenant, now)

    def sequences_of(self, names: Iterable[str], now: float) -> tuple[float, int]:
        """Places of these tenants: in the mean, and now."""
        found = [self._tenants.get(name) for name in names]
        known = [tenant for tenant in found if tenant is not None]
        mean = sum(tenant.usual_sequences.mean(now) for tenant in known)
        return mean, sum(tenant.sequences for tenant in known)

    def forget_idle(self, now: float) -> list[str]:
        """Forget who can be, and name them."""
        forgotten: list[str] = []
        excess = len(self._tenants) - self._remembered_max
        for name, tenant in self._tenants.items():
            is_old = tenant.active_at + self._forget_after_s <= now
            if not is_old and excess <= len(forgotten):
                break
            if tenant.requests == 0:
                forgotten.append(name)
        for name in forgotten:
            del self._tenants[name]
        return forgotten

    def _touch(self, tenant: Tenant, now: float) -> None:
        tenant.active_at = now
        self._tenants.move_to_end(tenant.name)
