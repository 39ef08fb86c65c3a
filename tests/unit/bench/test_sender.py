"""The sender against a server that answers as it is told, in time that jumps."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import numpy as np
import pytest

from bench.answer import Failure, Refusal
from bench.arrivals import arrival_times
from bench.plan import Arrivals, EndpointPlan, LoadPlan, RunPlan
from bench.record import LoadMode, Outcome
from bench.sender import Sender
from bench.workload import Planned, Workload
from kvferry.errors import InvalidInput
from tests.support.autojump import LoopClock, run_jumping

START = 10.0


class Numbers:
    def prompt(self, index):
        return np.array([index], dtype=np.int32)


@dataclass
class FakeServer:
    """First token after 1 s, then one each second."""

    refuses: frozenset = frozenset()
    breaks: frozenset = frozenset()
    running: int = 0
    most: int = 0

    async def ask(self, answer, prompt, answer_tokens):
        assert prompt.tolist() == [answer.index]
        answer.sends()
        if answer.index in self.refuses:
            raise Refusal("RESOURCE_EXHAUSTED")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(answer_tokens):
                await asyncio.sleep(1.0)
                answer.brings(1)
                if answer.index in self.breaks:
                    raise Failure("UNAVAILABLE")
        finally:
            self.running -= 1

    async def close(self):
        pass


def singles(count, answer_tokens=4, times=None):
    requests = tuple(
        Planned(i, i, answer_tokens, None if times is None else times[i]) for i in range(count)
    )
    return Workload("singles", requests, tuple(range(count)), Numbers())


def plan_of(deadline_s=100.0, part=0, parts=1, **load):
    return RunPlan(
        EndpointPlan(addresses=("a",)), load=LoadPlan(**load), deadline_s=deadline_s,
        part=part, parts=parts,
    )  # fmt: skip


def sent(plan, workload, server=None, until_s=None):
    """Columns by index, of a whole run or of one that is interrupted after `until_s`."""
    rows = {}

    async def main():
        sender = Sender(plan, workload, server or FakeServer(), LoopClock())
        running = asyncio.create_task(sender.run(START))
        await asyncio.wait([running], timeout=until_s)
        if running.cancel():
            await asyncio.wait([running])
        else:
            running.result()
        rows.update((answer.index, answer.columns(START)) for answer in sender.answers)

    run_jumping(main())
    return rows


def test_an_open_loop_does_not_wait_for_answers():
    server = FakeServer()
    load = {"mode": LoadMode.OPEN, "rate": 10.0, "arrivals": Arrivals.CONSTANT}
    rows = sent(plan_of(**load), singles(20, 50), server)
    assert server.most == 20, "requests waited for one another"
    assert [rows[i]["sent_s"] for i in range(20)] == pytest.approx([i / 10 for i in range(20)])
    assert all(row["outcome"] == "done" for row in rows.values())
    assert rows[3]["first_token_s"] - rows[3]["sent_s"] == pytest.approx(1.0)
    assert rows[3]["itl_mean_s"] == pytest.approx(1.0)
    assert rows[3]["end_s"] == pytest.approx(50.3)


def test_a_closed_loop_has_so_many_at_a_time_and_thinks_before_each():
    server = FakeServer()
    load = {"mode": LoadMode.CLOSED, "concurrency": 3, "think_s": 0.5}
    rows = sent(plan_of(**load), singles(9), server)
    assert server.most == 3
    assert sorted(row["sent_s"] for row in rows.values()) == pytest.approx(
        [0.5] * 3 + [5.0] * 3 + [9.5] * 3
    )


def test_a_replay_keeps_the_times_of_its_trace_scaled():
    load = {"mode": LoadMode.REPLAY, "time_scale": 0.5}
    rows = sent(plan_of(**load), singles(3, times=(0.0, 4.0, 5.0)))
    assert [rows[i]["sent_s"] for i in range(3)] == pytest.approx([0.0, 2.0, 2.5])


def test_a_turn_is_sent_when_the_answer_before_it_has_ended_and_was_thought_about():
    requests = (
        Planned(0, 0, 4, followers=(1, 2)),
        Planned(0, 0, 2, think_s=3.0),
        Planned(0, 0, 2, think_s=1.0, followers=(3,)),
        Planned(0, 0, 1),
    )
    workload = Workload("turns", requests, (0,), Numbers())
    rows = sent(plan_of(mode=LoadMode.CLOSED), workload)
    assert [rows[i]["scheduled_s"] for i in range(4)] == pytest.approx([0.0, 7.0, 5.0, 7.0])


def test_clients_share_a_workload_without_gap_or_repetition():
    load = {"mode": LoadMode.OPEN, "rate": 5.0}
    whole = sent(plan_of(**load), singles(20))
    parts = [sent(plan_of(part=part, parts=3, **load), singles(20)) for part in range(3)]
    assert sorted(index for rows in parts for index in rows) == list(range(20))
    for rows in parts:
        for index, row in rows.items():
            assert row["sent_s"] == pytest.approx(whole[index]["sent_s"]), "times are of one plan"


def test_users_of_a_closed_loop_are_split_over_the_clients():
    servers = [FakeServer() for _ in range(3)]
    for part, server in enumerate(servers):
        plan = plan_of(part=part, parts=3, mode=LoadMode.CLOSED, concurrency=5)
        sent(plan, singles(30), server)
    assert [server.most for server in servers] == [2, 2, 1]


def test_every_request_ends_in_a_way_that_is_told():
    server = FakeServer(refuses=frozenset([0]), breaks=frozenset([1]))
    workload = singles(4)
    requests = (*workload.requests[:2], replace(workload.requests[2], answer_tokens=50))
    workload = replace(workload, requests=(*requests, workload.requests[3]))
    rows = sent(plan_of(deadline_s=20.0, mode=LoadMode.OPEN), workload, server)
    assert [(rows[i]["outcome"], rows[i]["error"]) for i in range(4)] == [
        ("refused", "RESOURCE_EXHAUSTED"),
        ("failed", "UNAVAILABLE"),
        ("cancelled", "deadline"),
        ("done", None),
    ]
    assert rows[0]["first_token_s"] is None
    assert rows[2]["answer_tokens"] in (19, 20)
    assert server.running == 0


def test_an_interrupted_run_has_what_was_begun_and_cancels_what_runs():
    server = FakeServer()
    load = {"mode": LoadMode.OPEN, "rate": 1.0, "arrivals": Arrivals.CONSTANT}
    rows = sent(plan_of(**load), singles(50), server, until_s=START + 6.5)
    assert sorted(rows) == list(range(7)), "later ones were never sent"
    ends = [Outcome(rows[i]["outcome"]) for i in range(7)]
    assert ends == [Outcome.DONE] * 3 + [Outcome.CANCELLED] * 4
    assert server.running == 0


def test_a_replay_of_what_has_no_times_is_refused():
    with pytest.raises(InvalidInput, match=r"^load: "):
        Sender(plan_of(mode=LoadMode.REPLAY), singles(2), FakeServer(), LoopClock())


@pytest.mark.parametrize(
    ("arrivals", "burstiness", "variation"),
    [
        (Arrivals.CONSTANT, 9.0, 0.0),
        (Arrivals.POISSON, 9.0, 1.0),
        (Arrivals.GAMMA, 0.5, 0.5),
        (Arrivals.GAMMA, 3.0, 3.0),
    ],
)
def test_gaps_have_the_rate_and_the_variation_asked_for(arrivals, burstiness, variation):
    load = LoadPlan(rate=4.0, arrivals=arrivals, burstiness=burstiness)
    gaps = np.diff(arrival_times(load, 200_000, 3))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.03, abs=1e-9)
    assert (gaps >= 0).all()
