"""The replay of traces: its tree and caches against naive ones, its model on small traces."""

from __future__ import annotations

import gzip
import json
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench.prompt_tree import PromptTreeBuilder
from bench.traces import UnknownTraceFormat, read_trace
from benchmarks import router as benchmark
from benchmarks.replay import REQUEST_S, TOKENS_PER_S, Replay, ReplaySettings, Workload
from benchmarks.replay_cache import WorkerCaches
from benchmarks.replay_knowledge import Dispatch, RouterKnowledge
from router.policies.pool import Prompt

if TYPE_CHECKING:
    from pathlib import Path


def sessions_file(directory: Path, sessions: int = 60, turns: int = 3) -> Path:
    """Sessions of four groups: 32 shared blocks, 4 more in each turn."""
    path = directory / "tiny" / "trace.jsonl.gz"
    path.parent.mkdir()
    rows = []
    for session in range(sessions):
        for turn in range(turns):
            own = [10_000 + 100 * session, 4 * (turn + 1)]
            rows.append(
                {
                    "session": f"s{session}",
                    "turn": turn,
                    "think": 0.5,
                    "input_length": 16 * (32 + own[1]),
                    "output_length": 10,
                    "hash_runs": [[100 * (session % 4), 32], own],
                }
            )
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return Workload(read_trace(sessions_file(tmp_path_factory.mktemp("traces"))))


def random_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts of which most begin as others do; a block's number names its whole prefix."""
    names: dict[tuple[int, ...], int] = {}
    prompts = []
    for _ in range(count):
        path: tuple[int, ...] = ()
        for _ in range(rng.randrange(1, 9)):
            path = (*path, rng.randrange(2))
            names.setdefault(path, len(names))
        prompts.append([names[path[: end + 1]] for end in range(len(path))])
    return prompts


def test_caches_over_the_tree_are_lru_page_caches() -> None:
    """Against one list of blocks per worker, least recently used first, leaves before roots."""
    rng = random.Random(5)
    prompts = random_prompts(rng, 80)
    builder = PromptTreeBuilder()
    for blocks in prompts:
        builder.add(0, np.array(blocks, dtype=np.int64))
    tree = builder.build()
    caches = WorkerCaches(tree.node_blocks, 3, 12)
    naive: list[list[int]] = [[], [], []]
    for _ in range(600):
        number, worker = rng.randrange(80), rng.randrange(3)
        blocks, path = prompts[number], tree.paths[number]
        assert int(tree.node_blocks[path].sum()) == len(blocks)
        hits = [
            next((n for n, b in enumerate(blocks) if b not in held), len(blocks)) for held in naive
        ]
        assert caches.hit_blocks(path).tolist() == hits
        before = caches.held[:, worker].copy()
        changes = caches.store(worker, path)
        for node, gained in changes:
            before[node] += gained
        assert (before == caches.held[:, worker]).all()
        held = [block for block in naive[worker] if block not in blocks] + blocks[::-1]
        naive[worker] = held[max(0, len(held) - 12) :]


def test_a_single_request_takes_its_own_time(workload: Workload) -> None:
    settings = ReplaySettings(workers=4, seed=1, load=0.001)
    result = Replay(workload, benchmark.CONTENDERS["min_ttft"], settings).run()
    expected = (36 * 16) / TOKENS_PER_S + REQUEST_S
    assert result.ttft_s[0] == pytest.approx(expected)
    assert result.quantile_s(0.5) == pytest.approx(64 / TOKENS_PER_S + REQUEST_S)


def test_load_is_set_by_the_work_of_a_perfect_cache(workload: Workload) -> None:
    uncached = 4 * 32 * 16 + 60 * 12 * 16
    assert workload.work_s == pytest.approx(uncached / TOKENS_PER_S + 180 * REQUEST_S)
    times = workload.arrivals_s(ReplaySettings(workers=4, seed=1, load=0.5))
    span_s = workload.work_s / 2
    assert 0.9 * span_s < times.max() <= span_s
    offered = workload.prompt_tokens / span_s / 4
    assert workload.offered_tok_s_worker(0.5) == pytest.approx(offered)


@pytest.mark.parametrize("name", benchmark.CONTENDERS)
def test_a_replay_is_the_same_for_the_same_seed(workload: Workload, name: str) -> None:
    runs = [
        Replay(workload, benchmark.CONTENDERS[name], ReplaySettings(workers=4, seed=seed)).run()
        for seed in (1, 1, 2)
    ]
    assert runs[0].ttft_s.tolist() == runs[1].ttft_s.tolist()
    assert runs[0].ttft_s.tolist() != runs[2].ttft_s.tolist()


def test_what_other_routers_do_is_known_late(workload: Workload) -> None:
    policy = benchmark.CONTENDERS[benchmark.OURS]

    def hit_rate(routers: int, delay_s: float) -> float:
        settings = ReplaySettings(4, 1, routers=routers, event_delay_s=delay_s)
        return Replay(workload, policy, settings).run().hit_rate

    assert hit_rate(3, 0.05) > hit_rate(3, 1e9)


def test_other_routers_hear_of_a_prompt_when_it_is_accepted_and_of_evictions_when_they_happen() -> (
    None
):
    policy = benchmark.CONTENDERS["min_ttft"]
    nodes = np.array([4, 3], dtype=np.int64)
    own, other = (RouterKnowledge(policy, nodes, 1, 1000, 8.0) for _ in range(2))
    paths = [np.array([node], dtype=np.int64) for node in range(2)]

    def held(router: RouterKnowledge, now: float) -> list[int]:
        ends = np.array([160], dtype=np.int64)
        prompt = Prompt(160, np.zeros(1, dtype=np.uint64), ends)
        return [int(router.view(now, prompt, path, 16).hit_tokens[0]) // 16 for path in paths]

    for router in (own, other):
        router.hear(Dispatch(0, 48, 0.0, 1.0, 1.0, [(1, 3)]), None)
    news = Dispatch(0, 64, 2.0, 1.0, 5.0, [(0, 4), (1, -2)])
    own.hear(news, None)
    other.hear(news, 0.1)
    assert held(own, 2.0) == [4, 1]
    assert [held(other, now) for now in (2.09, 2.11, 5.09, 5.11)] == [
        [0, 3],
        [4, 3],
        [4, 3],
        [4, 1],
    ]


def test_the_default_holds_its_own_on_a_shared_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row that every change of a policy is held to."""
    path = sessions_file(tmp_path, sessions=120)
    arguments = ["--trace", str(path), "--workers", "4", "--policy", "all", "--json"]
    assert benchmark.main(arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_policy = {row["policy"]: row for row in rows}
    assert by_policy.keys() == benchmark.CONTENDERS.keys()
    ours = by_policy.pop(benchmark.OURS)
    assert ours["trace"] == "tiny"
    best = min(row["ttft_p90_s"] for row in by_policy.values())
    near = [row["hit_rate"] for row in by_policy.values() if row["ttft_p90_s"] <= 2 * best]
    assert ours["ttft_p90_s"] <= 1.05 * best
    assert ours["hit_rate"] >= 0.97 * max(near)


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_a_replay_that_ends_early_says_what_a_whole_one_does(
    workload: Workload, share: float
) -> None:
    policy, settings = benchmark.CONTENDERS["min_ttft"], ReplaySettings(4, seed=1, load=2.0)
    result = Replay(workload, policy, settings).run()
    middle = result.quantile_s(share)
    for limit_s in (0.0, *np.quantile(result.ttft_s, [share - 0.02, share]), middle, 9.0):
        holds = Replay(workload, policy, settings).holds(share, float(limit_s))
        assert holds == (middle <= limit_s), limit_s


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
MOONCAKE = '{"timestamp": 5, "input_length": 700, "output_length": 5, "hash_ids": [3, 9]}\n'
WEKA_CALLS = [
    [0.0, 0.0, 7.0, 130, 10, [[1, 3]], "tool_use"],
    {"t": 9.0, "sub": [[0.0, 0.0, 2.0, 70, 5, [[50, 2]], "end_turn"]]},
    [20.0, 13.0, 9.0, 200, 9, [[1, 2], [4, 2]], "end_turn"],
]
SERVEGEN = {
    "quantiles": [0, 1],
    "clients": [
        {"windows": [[0, 2.0, 1.0, "G", 0.5, 1.0]], "lengths": {"0": [[100, 200], [10, 20]]}}
    ],
}


def read_text(directory: Path, text: str) -> Workload:
    path = directory / "some.jsonl"
    path.write_text(text)
    return Workload(read_trace(path))


def test_formats_with_recorded_times(tmp_path: Path) -> None:
    for text, tokens, blocks in ((AZURE, 374, 1), (MOONCAKE, 700, 2)):
        trace = read_text(tmp_path, text).trace
        assert (trace.is_open_loop, len(trace.requests)) == (True, 1)
        assert (trace.requests[0].prompt_tokens, int(trace.tree.node_blocks.sum())) == (
            tokens,
            blocks,
        )


def test_agent_sessions_have_sub_agents(tmp_path: Path) -> None:
    row = {"id": "a", "block_size": 64, "requests": WEKA_CALLS}
    trace = read_text(tmp_path, json.dumps(row)).trace
    first, sub, second = trace.requests
    assert trace.starts == (0,)
    assert first.followers == [1, 2]
    assert (sub.think_s, second.think_s) == (2.0, 13.0)
    assert trace.prompts[2].ends[0] == 128, "shares two blocks with the first call"


def test_rates_of_clients_are_drawn_by_the_seed(tmp_path: Path) -> None:
    trace = read_text(tmp_path, json.dumps(SERVEGEN)).trace
    assert 9_000 < len(trace.requests) < 11_000
    assert all(100 <= request.prompt_tokens <= 200 for request in trace.requests)


@pytest.mark.parametrize("text", ["{}\n", "what\n", ""])
def test_an_unknown_format_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UnknownTraceFormat):
        read_text(tmp_path, text)
