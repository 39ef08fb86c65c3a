"""The console's API over real HTTP: what it tells, whom, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from kvferry.accounts import KvAccounts, WorkerLoad
from kvferry.handoff_view import HandoffView
from kvferry.ids import Attempt, Incarnation, RequestId
from kvferry.limits import CONSOLE_TREE_NODES_MAX, CONSOLE_TREE_WAITING_MAX
from kvferry.membership import Role
from kvferry.router_config import ConsoleConfig, SecurityConfig
from kvferry.tree_view import NodeView, TreeQuery, TreeView
from router.api.console.page import ConsolePage
from router.api.console.request_answers import first_token_at
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_bench import RouterBench, eventually, router_bench
from tests.support.router_model import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

BLUE, ADMIN = "the-key-of-blue-0001", "the-key-of-admin-001"
NASTY = '<img src=x onerror=alert(1)>"</script>'


class Web:
    """GET below `/console`, with the same headers each time."""

    def __init__(self, bench: RouterBench, session: aiohttp.ClientSession) -> None:
        self._url = f"{bench.http_url}/console"
        self._session = session

    async def get(self, path: str, **headers: str) -> tuple[int, Any, str]:
        """Status, headers, body."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.get(
            f"{self._url}{path}", headers=given, allow_redirects=False
        ) as response:
            return response.status, response.headers, await response.text()

    async def api(self, path: str, **headers: str) -> Any:
        """What a call that succeeds answers."""
        status, _, body = await self.get(f"/api/{path}", **headers)
        assert status == 200, body
        return json.loads(body)

    async def refusal(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and message of one that does not."""
        status, _, body = await self.get(f"/api/{path}", **headers)
        return status, json.loads(body)["error"]["message"]


def run(
    directory: Path,
    test: Callable[[RouterBench, Web], Awaitable[None]],
    *workers: FakeWorker,
    **settings: Any,
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(60),
            router_bench(directory, *workers, **settings) as bench,
            aiohttp.ClientSession() as session,
        ):
            await test(bench, Web(bench, session))

    asyncio.run(main())


def busy_pair() -> tuple[FakeWorker, FakeWorker]:
    accounts = KvAccounts(40, 30, 10, 15, 5, 100, 8, 2, 64)
    load = WorkerLoad(running=3, waiting=1, waiting_tokens=77, handoffs=2)
    prefill = FakeWorker("p", Role.PREFILL, load=load, accounts=accounts)
    decode = FakeWorker("d", Role.DECODE, load=load, accounts=accounts)
    return prefill, decode


def node(number: int, parent: int = 0, tokens: tuple[int, ...] = ()) -> NodeView:
    return NodeView(
        node_id=number,
        parent_id=parent,
        start=0,
        length=16,
        lock_ref=1,
        hits=5,
        last_access=9,
        children=1,
        on_device=True,
        on_host=False,
        priority=0,
        namespace="abcd",
        tokens=tokens,
    )


def test_the_cluster_as_the_router_knows_it(directory: Path) -> None:
    prefill, decode = busy_pair()

    async def test(bench: RouterBench, web: Web) -> None:
        await eventually(lambda: all(each.status for each in bench.router.worker_summaries()))
        cluster = await web.api("cluster")
        assert [worker["id"] for worker in cluster["workers"]] == ["d", "p"]
        told = cluster["workers"][1]
        assert told["role"] == "prefill"
        assert told["incarnation"] == f"{prefill.incarnation:x}"
        assert told["load"]["waiting_tokens"] == 77
        accounts = told["accounts"]
        assert accounts["private"] == 15
        owners = ("free", "evictable", "protected", "private", "inbound", "loading")
        assert sum(accounts[owner] for owner in owners) == accounts["total"] == 100
        assert cluster["roles"]["decode"] == {
            "workers": 1,
            "reachable": 1,
            "running": 3,
            "waiting": 1,
            "slots_held": 30,
            "slots_total": 100,
        }
        assert cluster["workers_left_out"] == 0

    run(directory, test, prefill, decode)


def test_a_worker_that_does_not_answer_is_told_with_its_last_word(directory: Path) -> None:
    prefill, decode = busy_pair()

    async def test(bench: RouterBench, web: Web) -> None:
        await eventually(lambda: all(each.status for each in bench.router.worker_summaries()))
        decode.status_fails = True
        await eventually(lambda: not all(s.is_reachable for s in bench.router.worker_summaries()))
        cluster = await web.api("cluster")
        told = {worker["id"]: worker for worker in cluster["workers"]}
        assert not told["d"]["reachable"]
        assert told["d"]["accounts"]["private"] == 15
        assert cluster["roles"]["decode"]["running"] == 0

    run(directory, test, prefill, decode)


def test_a_tree_with_and_without_texts(directory: Path) -> None:
    text = "hi <b>"
    tokens = tuple(byte_tokenizer().encode(text).ids)
    worker = FakeWorker("w", tree=TreeView((7,), 32, (node(8, 7, tokens),), 48, 16, False, 1.25))

    async def test(bench: RouterBench, web: Web) -> None:
        tree = await web.api("workers/w/tree?nodes=50&depth=3&tokens=8&path=7.9")
        assert worker.tree_queries == [TreeQuery(50, 3, 8, (7, 9))]
        assert tree["path"] == ["7"]
        assert (tree["evictable"], tree["protected"], tree["whole"]) == (48, 16, False)
        (told,) = tree["nodes"]
        assert (told["id"], told["parent"], told["hits"], told["locks"]) == ("8", "7", 5, 1)
        assert told["tokens"] == list(tokens)
        assert told["text"] is None
        tree = await web.api("workers/w/tree?tokens=8&text=true")
        assert tree["nodes"][0]["text"] == text

    run(directory, test, worker)


def test_those_who_ask_the_same_at_once_cost_one_view(directory: Path) -> None:
    worker = FakeWorker("w")

    async def test(bench: RouterBench, web: Web) -> None:
        path = "workers/w/tree?nodes=5"
        await asyncio.gather(*(web.api(path) for _ in range(CONSOLE_TREE_WAITING_MAX)))
        assert len(worker.tree_queries) == 1

    run(directory, test, worker)


def test_too_many_who_wait_for_one_worker_are_told_when_to_come_again(directory: Path) -> None:
    async def test(bench: RouterBench, web: Web) -> None:
        calls = (web.get(f"/api/workers/w/tree?nodes={count}") for count in range(1, 10))
        answers = await asyncio.gather(*calls)
        refused = [headers for status, headers, _ in answers if status == 429]
        assert len(refused) == 9 - CONSOLE_TREE_WAITING_MAX
        assert all("Retry-After" in headers for headers in refused)

    run(directory, test, FakeWorker("w"))


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("workers/w/tree?nodes=0", "nodes"),
        (f"workers/w/tree?nodes={CONSOLE_TREE_NODES_MAX + 1}", "nodes"),
        ("workers/w/tree?nodes=1e3", "nodes"),
        ("workers/w/tree?depth=-1", "depth"),
        ("workers/w/tree?tokens=65", "tokens"),
        ("workers/w/tree?path=1..2", "path"),
        ("workers/w/tree?path=99999999999999999999", "path"),
        ("workers/w/tree?path=9223372036854775808", "path"),
        ("workers/w/tree?text=1", "text"),
        ("workers/w/tree?node=5", "node"),
        ("handoffs?nodes=5", "nodes"),
        ("cluster?sinc=5", "sinc"),
        ("cluster?since=-2", "since"),
        ("cluster?since=x", "since"),
        ("requests?count=0", "count"),
        ("requests?count=201", "count"),
    ],
)
def test_a_bad_parameter_is_named(directory: Path, path: str, field: str) -> None:
    async def test(bench: RouterBench, web: Web) -> None:
        status, message = await web.refusal(path)
        assert status == 400
        assert message.startswith(f"{field}: ")

    run(directory, test, FakeWorker("w"))


def test_an_unknown_worker_and_one_that_fails(directory: Path) -> None:
    async def test(bench: RouterBench, web: Web) -> None:
        assert (await web.refusal("workers/nobody/tree"))[0] == 404
        assert (await web.refusal("workers/w/tree"))[0] == 503

    run(directory, test, FakeWorker("w", views_fail=True))


def test_both_sides_of_a_handoff_are_one(directory: Path) -> None:
    prefill, decode = busy_pair()
    both = (RequestId(NASTY), Attempt(2), prefill.incarnation, decode.incarnation)
    prefill.handoffs = (
        HandoffView(*both, True, "streaming", 0.5, prompt_tokens=100, computed_tokens=60),
    )
    decode.handoffs = (
        HandoffView(*both, False, "receiving", 0.6, 100, moved_bytes=300, total_bytes=900),
        HandoffView(RequestId("other"), Attempt(1), Incarnation(0xABC), decode.incarnation,
                    False, "requested", 0.1, 20),
    )  # fmt: skip

    async def test(bench: RouterBench, web: Web) -> None:
        await eventually(lambda: all(each.status for each in bench.router.worker_summaries()))
        answer = await web.api("handoffs")
        first, second = answer["handoffs"]
        assert first["request_id"] == NASTY
        assert (first["source"], first["sink"], first["state"]) == ("p", "d", "receiving")
        assert (first["source_state"], first["computed_tokens"]) == ("streaming", 60)
        assert (first["moved_bytes"], first["total_bytes"]) == (300, 900)
        assert (second["source"], second["source_state"]) == ("abc", None)
        assert answer["workers_asked"] == 2

    run(directory, test, prefill, decode)


def test_idle_workers_are_not_asked_for_handoffs(directory: Path) -> None:
    async def test(bench: RouterBench, web: Web) -> None:
        answer = await web.api("handoffs")
        assert (answer["handoffs"], answer["workers_asked"]) == ([], 0)

    run(directory, test, FakeWorker("w", views_fail=True))


def test_a_request_with_its_phases_while_it_runs_and_after(directory: Path) -> None:
    worker = FakeWorker("w", script=lambda _: Script(tokens=(72, 73, 74), hang_after=2))

    async def test(bench: RouterBench, web: Web) -> None:
        task = asyncio.create_task(bench.ask("hello", request_id=NASTY, tenant="<b>"))
        await eventually(lambda: any(map(first_token_at, bench.router.log.running())))
        answer = await web.api("requests")
        (running,) = answer["requests"]
        assert (running["id"], running["tenant"], running["outcome"]) == (NASTY, "<b>", "running")
        assert (running["prompt_tokens"], running["decode_worker"]) == (5, "w")
        assert 0 < running["ttft_s"] <= running["duration_s"]
        ends = [phase["end_s"] for phase in running["phases"]]
        assert {phase["kind"] for phase in running["phases"]} >= {"queue"}
        assert max(ends) <= running["duration_s"] + 1e-3
        bench.router.cancel(NASTY)
        await task
        (ended,) = (await web.api("requests?count=5"))["requests"]
        assert ended["outcome"] == "cancelled"
        assert ended["generated_tokens"] == 2

    run(directory, test, worker)


def test_samples_come_once_each_and_tell_of_requests(directory: Path) -> None:
    async def test(bench: RouterBench, web: Web) -> None:
        await bench.ask("hello")
        told: list[Any] = []
        since, first = -1, 0
        while not any(point["succeeded"] for point in told) or len(told) < 2:
            history = (await web.api(f"cluster?since={since}"))["history"]
            assert history["first"] == first
            fields = history["fields"]
            told += [dict(zip(fields, point, strict=True)) for point in history["points"]]
            since = first + len(history["points"]) - 1
            first = since + 1
            await asyncio.sleep(0.1)
        times = [point["at_s"] for point in told]
        assert times == sorted(set(times))
        assert sum(point["generated_tokens_per_s"] for point in told) > 0
        assert max(point["ttft_p50_s"] or 0 for point in told) > 0
        # Who knows numbers of an earlier router gets everything.
        assert (await web.api("cluster?since=100000"))["history"]["first"] == 0

    run(directory, test, FakeWorker("w"))


def test_who_came_and_went(directory: Path) -> None:
    first, second = busy_pair()

    async def test(bench: RouterBench, web: Web) -> None:
        async def told(*wanted: tuple[str, str]) -> Any:
            while True:
                cluster = await web.api("cluster")
                texts = [(event["worker"], event["text"]) for event in cluster["events"]]
                if set(wanted) <= set(texts):
                    return cluster
                await asyncio.sleep(0.05)

        await told(("p", "joined for prefill"), ("d", "joined for decode"))
        second.status_fails = True
        await told(("d", "does not answer"))
        await bench.members(first.info)
        cluster = await told(("d", "left the cluster"))
        (gone,) = cluster["gone"]
        assert (gone["id"], gone["role"]) == ("d", "decode")
        assert gone["left_at_s"] <= cluster["now_s"]

    run(directory, test, first, second)


def test_with_keys_only_the_operator_sees_the_cluster_and_everybody_the_page(
    directory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"blue: {BLUE}\nadmin: {ADMIN}\n")

    async def test(bench: RouterBench, web: Web) -> None:
        for path in ("cluster", "handoffs", "requests", "workers/w/tree"):
            assert (await web.refusal(path))[0] == 401
            blue = f"Bearer {BLUE}"
            assert (await web.refusal(path, Authorization=blue))[0] == 403
            await web.api(path, Authorization=f"Bearer {ADMIN}")
            # Behind a name of its own: a page that leads here has no key.
            await web.api(path, x_api_key=ADMIN, Host="console.example")
        assert (await web.get("/"))[0] == 200

    run(directory, test, FakeWorker("w"), security=SecurityConfig(api_keys=str(file)))


def test_pages_of_others_learn_nothing(directory: Path) -> None:
    async def test(bench: RouterBench, web: Web) -> None:
        for headers in (
            {"Sec_Fetch_Site": "cross-site"},
            {"Sec_Fetch_Site": "same-site"},
            {"Host": "rebound.example"},
            {"Host": "127.0.0.1.example:80"},
        ):
            assert (await web.refusal("cluster", **headers))[0] == 403, headers
        for headers in (
            {"Sec_Fetch_Site": "same-origin"},
            {"Host": "[::1]:9"},
            {"Host": "localhost"},
        ):
            await web.api("cluster", **headers)

    run(directory, test, FakeWorker("w"))


def test_the_page_is_guarded_and_needs_nothing_from_elsewhere(directory: Path) -> None:
    async def test(bench: RouterBench, web: Web) -> None:
        status, headers, _ = await web.get("")
        assert (status, headers["Location"]) == (308, "console/")
        for name in ("", *ConsolePage().names):
            status, headers, body = await web.get(f"/{name}")
            assert status == 200, name
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            addresses = body.replace("http://www.w3.org/2000/svg", "")
            assert "http:" not in addresses, name
            assert "https:" not in addresses, name
            assert "innerHTML" not in body, name
            tag = headers["ETag"]
            assert (await web.get(f"/{name}", If_None_Match=tag))[0] == 304
        for path in ("/nothing.js", "/../service.py", "/api/nothing", "/static/app.js"):
            assert (await web.get(path))[0] == 404, path
        status, headers, _ = await web.get("/api/cluster")
        assert headers["Cache-Control"] == "no-store"

    run(directory, test, FakeWorker("w"))


def test_it_can_be_left_out(directory: Path) -> None:
    async def test(bench: RouterBench, web: Web) -> None:
        assert (await web.get("/"))[0] == 404
        assert (await web.get("/api/cluster"))[0] == 404

    run(directory, test, FakeWorker("w"), console=ConsoleConfig(enabled=False))
