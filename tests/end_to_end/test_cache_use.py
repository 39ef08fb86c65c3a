"""Salts, ways of sharing and audits, from a client's call to the tree of each worker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from cluster import cli
from kvferry.config import load_config
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.in_process_cluster import InProcessCluster, collect
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvferry.config import ClusterConfig

PROMPT_TOKENS = 64
PAGE = 16


def _config(**overrides: str) -> ClusterConfig:
    settings = {"cache.page_size": str(PAGE), "model.context_length": "256"}
    settings |= {"cache.memory_bytes": str(64 * 2**20)}
    return load_config(None, {}, settings | overrides)


@pytest.fixture(scope="module")
def pair() -> Iterator[InProcessCluster]:
    overrides = {"cache.audit_interval_steps": "1"}
    with InProcessCluster(_config(**overrides), (Role.PREFILL, Role.DECODE)) as cluster:
        yield cluster


def _prompt(seed: int) -> list[int]:
    """A prompt of its own for each test, so that none hits what another one left."""
    return np.random.default_rng(seed).integers(100, 20_000, PROMPT_TOKENS).tolist()


def _ask(cluster: InProcessCluster, ids: list[int], **fields: Any) -> inference.Usage:
    request = inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=ids),
        sampling=inference.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
        **fields,
    )
    answer = collect(cluster.stub.Generate(request, timeout=60))
    cluster.wait_idle()
    return answer.finish.usage


def _hits(usage: inference.Usage) -> tuple[int, int]:
    """(at the source, at the sink) in tokens."""
    assert usage.host_hit_tokens == 0
    assert usage.moved_tokens == usage.prompt_tokens - usage.decode_hit_tokens
    return usage.prefill_hit_tokens, usage.decode_hit_tokens


# The source computes the last token again for its logits, and hits whole pages.
ALL = (PROMPT_TOKENS - PAGE, PROMPT_TOKENS)
NONE = (0, 0)


def test_equal_salts_share_and_different_ones_never_do(pair: InProcessCluster) -> None:
    ids = _prompt(1)
    assert _hits(_ask(pair, ids, cache_salt="a")) == NONE
    assert _hits(_ask(pair, ids, cache_salt="a")) == ALL
    assert _hits(_ask(pair, ids, cache_salt="b")) == NONE
    assert _hits(_ask(pair, ids)) == NONE
    assert _hits(_ask(pair, ids)) == ALL
    assert _hits(_ask(pair, ids, cache_salt="b")) == ALL


def test_a_private_request_neither_uses_nor_leaves_kv(pair: InProcessCluster) -> None:
    ids, private = _prompt(2), inference.SHARING_PRIVATE
    assert _hits(_ask(pair, ids, sharing=private)) == NONE
    assert _hits(_ask(pair, ids)) == NONE
    assert _hits(_ask(pair, ids, sharing=private)) == NONE
    assert _hits(_ask(pair, ids)) == ALL


def test_a_recomputed_request_uses_no_kv_but_leaves_its_own(pair: InProcessCluster) -> None:
    ids, recomputed = _prompt(3), inference.SHARING_RECOMPUTED
    assert _hits(_ask(pair, ids, sharing=recomputed)) == NONE
    assert _hits(_ask(pair, ids, sharing=recomputed)) == NONE
    assert _hits(_ask(pair, ids)) == ALL


def test_an_audit_of_the_running_workers_is_clean(
    pair: InProcessCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    _ask(pair, _prompt(4))
    assert cli.main(["audit", "--address", pair.address]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["decode-1", "right"],
        ["prefill-0", "right"],
    ]
    answer = pair.admin.Audit(inference.AuditRequest(), timeout=30)
    assert [entry.worker_id for entry in answer.audits] == ["decode-1", "prefill-0"]
    for entry in answer.audits:
        assert list(entry.report.violations) == []
        assert entry.report.accounts.total > 0
        assert entry.report.engine_steps > 0


def test_audits_between_the_steps_of_running_requests_are_clean(pair: InProcessCluster) -> None:
    prompts = [_prompt(seed) for seed in range(10, 18)]
    live = 0
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(pair.generate_all, prompts, 8, 4)
        while not answers.done():
            for entry in pair.admin.Audit(inference.AuditRequest(), timeout=30).audits:
                assert list(entry.report.violations) == []
                live = max(live, entry.report.accounts.rows_live)
        assert len(answers.result()) == len(prompts)
    assert live > 1, "no audit met running requests"
    pair.wait_idle()


def test_an_audit_finds_a_page_that_nobody_owns(capsys: pytest.CaptureFixture[str]) -> None:
    with InProcessCluster(_config(), (Role.BOTH,)) as cluster:
        kv_cache = cluster.workers[0]._kv_cache
        assert kv_cache is not None
        kv_cache.allocator.alloc(PAGE)
        (entry,) = cluster.admin.Audit(
            inference.AuditRequest(worker_id="both-0"), timeout=30
        ).audits
        assert any("lost" in violation for violation in entry.report.violations)
        assert any("check 8" in violation for violation in entry.report.violations)
        assert cli.main(["audit", "both-0", "--address", cluster.address]) == 1
        printed = capsys.readouterr()
        assert "lost" in printed.out
        assert printed.err == "kvferry: violations in: both-0\n"
        # The worker goes on: it is the operator's to decide.
        assert cluster.workers[0].is_alive()


def test_an_audit_that_finds_something_by_itself_ends_the_worker() -> None:
    config = _config(**{"cache.audit_interval_steps": "1"})
    with InProcessCluster(config, (Role.BOTH,)) as cluster:
        kv_cache = cluster.workers[0]._kv_cache
        assert kv_cache is not None
        kv_cache.allocator.alloc(PAGE)
        request = inference.GenerateRequest(text="hello", sampling={"max_tokens": 4})
        with pytest.raises(grpc.RpcError, match="lost"):
            collect(cluster.stub.Generate(request, timeout=60))
        assert not cluster.workers[0].is_alive()


@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.BOTH,)], ids=str)
def test_kv_that_comes_back_from_host_memory_is_told_apart(roles: tuple[Role, ...]) -> None:
    overrides = {
        # 420 tokens of KV on the device, as many answers' worth in host memory.
        "cache.memory_bytes": str(420 * 46_080),
        "cache.host.memory_bytes": str(64 * 2**20),
        "cache.host.load_back_tokens_min": str(PAGE),
        "cache.audit_interval_steps": "1",
    }
    with InProcessCluster(_config(**overrides), roles) as cluster:
        ids = _prompt(20)
        first = _ask(cluster, ids)
        assert (first.prefill_hit_tokens, first.host_hit_tokens) == NONE
        for seed in range(21, 29):  # more than the device holds
            _ask(cluster, _prompt(seed))
        again = _ask(cluster, ids)
        assert (again.prefill_hit_tokens, again.host_hit_tokens) == (0, PROMPT_TOKENS - PAGE)
        loaded = cluster.workers[0].snapshot().counters["host_tokens_loaded"]
        assert loaded >= PROMPT_TOKENS - PAGE

        def source() -> inference.WorkerSummary:
            status = cluster.admin.ClusterStatus(inference.ClusterStatusRequest(), timeout=60)
            (found,) = [each for each in status.workers if each.worker_id.endswith("-0")]
            return found

        # The router's figures are as old as its last poll.
        wait_until("told", lambda: source().counters["host_tokens_loaded"] == loaded)
        total = source().host_accounts.total
        assert total > 0
        for entry in cluster.admin.Audit(inference.AuditRequest(), timeout=30).audits:
            assert list(entry.report.violations) == []
            assert entry.report.host_accounts.total == total


def test_kv_in_files_is_found_by_the_next_process(tmp_path: Path) -> None:
    overrides = {
        "cache.host.memory_bytes": str(64 * 2**20),
        "cache.host.load_back_tokens_min": str(PAGE),
        "cache.host.files.directory": str(tmp_path),
        "cache.audit_interval_steps": "1",
    }
    config, ids, pages = _config(**overrides), _prompt(30), PROMPT_TOKENS // PAGE
    with InProcessCluster(config, (Role.BOTH,)) as cluster:
        _ask(cluster, ids, cache_salt="a")

        def written() -> int:
            return cluster.workers[0].snapshot().counters["file_tier_written"]

        wait_until("in files", lambda: written() >= pages, state=written)
    with InProcessCluster(config, (Role.BOTH,)) as cluster:
        other = _ask(cluster, ids, cache_salt="b")
        assert (other.prefill_hit_tokens, other.host_hit_tokens) == NONE
        same = _ask(cluster, ids, cache_salt="a")
        assert (same.prefill_hit_tokens, same.host_hit_tokens) == (0, PROMPT_TOKENS - PAGE)
