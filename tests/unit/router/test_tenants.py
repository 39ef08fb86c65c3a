"""Allowances of tenants, and how they are remembered."""

from __future__ import annotations

import pytest

from kvferry.errors import InvalidInput
from kvferry.router_config import TenantConfig
from router.tenants import Bucket, RefusalReason, TenantBook


def test_a_bucket_gives_a_minutes_worth_and_what_flows_in() -> None:
    bucket = Bucket(60.0, now=0.0)
    for _ in range(60):
        assert bucket.wait_s(1.0, 0.0) == 0.0
        bucket.take(1.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(10.0, 4.0) == pytest.approx(6.0)
    assert bucket.wait_s(1.0, 1.0 + 1e-9) == 0.0
    bucket.give_back(100.0, 4.0)
    assert bucket.wait_s(60.0, 4.0) == 0.0
    assert bucket.wait_s(60.5, 4.0) > 0.0


def test_an_allowance_below_one_still_lets_one_through() -> None:
    bucket = Bucket(0.5, now=0.0)
    bucket.take(1.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(120.0)


def test_no_limits_by_default() -> None:
    book = TenantBook(TenantConfig())
    tenant = book.find("t", 0.0)
    for _ in range(1000):
        assert book.enter(tenant, 0.0, None) is None
        assert book.take_tokens(tenant, 10**9, 0.0) is None
    assert tenant.requests == 1000


def test_requests_in_flight_are_limited_per_tenant() -> None:
    book = TenantBook(TenantConfig(concurrent_max=2))
    tenant, other = book.find("t", 0.0), book.find("o", 0.0)
    assert [book.enter(tenant, 0.0, 3.0) is None for _ in range(3)] == [True, True, False]
    refusal = book.enter(tenant, 0.0, 3.0)
    assert refusal is not None
    assert refusal.reason is RefusalReason.TENANT_CONCURRENT
    # One of two that last three seconds each ends within half of that.
    assert refusal.retry_after_s == 1.5
    assert book.enter(other, 0.0, None) is None
    book.leave(tenant, 0, 0.0)
    assert book.enter(tenant, 0.0, None) is None


def test_requests_per_minute_say_when_the_next_one_may_come() -> None:
    book = TenantBook(TenantConfig(requests_per_minute=2.0))
    tenant = book.find("t", 0.0)
    assert [book.enter(tenant, 0.0, None) is None for _ in range(2)] == [True, True]
    refusal = book.enter(tenant, 10.0, None)
    assert refusal is not None
    assert refusal.reason is RefusalReason.TENANT_REQUESTS
    assert refusal.retry_after_s == pytest.approx(20.0)
    assert tenant.requests == 2
    assert book.enter(tenant, 10.0 + refusal.retry_after_s + 1e-6, None) is None


def test_tokens_are_taken_at_once_and_what_is_not_used_comes_back() -> None:
    book = TenantBook(TenantConfig(tokens_per_minute=600.0))
    tenant = book.find("t", 0.0)
    assert book.enter(tenant, 0.0, None) is None
    assert book.take_tokens(tenant, 500, 0.0) is None
    refusal = book.take_tokens(tenant, 200, 0.0)
    assert refusal is not None
    assert refusal.reason is RefusalReason.TENANT_TOKENS
    assert refusal.retry_after_s == pytest.approx(10.0)
    book.leave(tenant, unused_tokens=100, now=0.0)
    assert book.take_tokens(tenant, 200, 0.0) is None


def test_what_an_allowance_can_never_cover_is_no_overload() -> None:
    book = TenantBook(TenantConfig(tokens_per_minute=100.0))
    with pytest.raises(InvalidInput, match=r"^sampling\.max_tokens: .*101 tokens.* 100 tokens"):
        book.take_tokens(book.find("t", 0.0), 101, 0.0)


def test_a_long_name_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"^tenant: has 129 characters; at most 128"):
        TenantBook(TenantConfig()).find("t" * 129, 0.0)


def test_who_is_idle_for_a_minute_is_forgotten_with_full_buckets() -> None:
    book = TenantBook(TenantConfig(requests_per_minute=1.0, tokens_per_minute=50.0))
    idle, busy = book.find("idle", 0.0), book.find("busy", 0.0)
    for tenant in (idle, busy):
        assert book.enter(tenant, 0.0, None) is None
    book.leave(idle, 0, 1.0)
    assert book.forget_idle(60.5) == []
    assert idle.requests_bucket is not None
    assert idle.requests_bucket.wait_s(1.0, 61.0) == 0.0
    assert book.forget_idle(61.0) == ["idle"]
    assert [tenant.name for tenant in book] == ["busy"]


def test_slow_buckets_are_remembered_until_they_are_full() -> None:
    book = TenantBook(TenantConfig(requests_per_minute=0.5))
    tenant = book.find("t", 0.0)
    assert book.enter(tenant, 0.0, None) is None
    book.leave(tenant, 0, 0.0)
    assert book.forget_idle(119.0) == []
    assert book.forget_idle(120.0) == ["t"]


def test_no_more_idle_tenants_are_remembered_than_allowed() -> None:
    book = TenantBook(TenantConfig(), remembered_max=3)
    for number in range(3):
        assert book.enter(book.find(f"busy{number}", 0.0), 0.0, None) is None
    for number in range(5):
        book.find(f"idle{number}", 0.0)
    assert book.forget_idle(0.0) == [f"idle{number}" for number in range(5)]
    assert len(book) == 3
