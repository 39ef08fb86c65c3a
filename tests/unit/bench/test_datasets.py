from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from bench.datasets import workload_of
from bench.plan import DatasetKind, DatasetPlan
from kvferry.errors import InvalidInput

MOONCAKE = Path(__file__).parents[2] / "data" / "mooncake" / "conversation_30_rows.jsonl"
VOCAB = 8000


def shared(one, other):
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if differs.size else length


def prompts_of(plan, seed=1):
    workload = workload_of(plan, seed, VOCAB)
    return workload, [workload.prompts.prompt(i) for i in range(len(workload.requests))]


GENERATED = [
    DatasetPlan(DatasetKind.RANDOM, requests_max=12, prompt_tokens=40, length_spread=0.5),
    DatasetPlan(DatasetKind.SHARED_PREFIX, requests_max=12, prompt_tokens=20, prefix_tokens=64),
    DatasetPlan(DatasetKind.MULTI_TURN, requests_max=12, prompt_tokens=20, prefix_tokens=64),
    DatasetPlan(DatasetKind.TRACE, str(MOONCAKE), requests_max=30),
]


@pytest.mark.parametrize("plan", GENERATED, ids=lambda plan: plan.kind.value)
def test_prompts_are_a_function_of_data_set_seed_and_vocabulary(plan):
    _, first = prompts_of(plan)
    _, again = prompts_of(plan)
    _, other = prompts_of(plan, seed=2)
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert not any(np.array_equal(one, two) for one, two in zip(first, other, strict=True))
    every = np.concatenate(first)
    assert VOCAB // 8 <= every.min() <= every.max() < VOCAB - VOCAB // 8


def test_a_trace_shares_what_its_blocks_share():
    rows = [json.loads(line) for line in MOONCAKE.read_text().splitlines()]
    workload, prompts = prompts_of(GENERATED[-1])
    assert [len(prompt) for prompt in prompts] == [row["input_length"] for row in rows]
    assert [request.answer_tokens for request in workload.requests] == [
        row["output_length"] for row in rows
    ]
    for one in range(len(rows)):
        for other in range(one):
            blocks = shared(np.array(rows[one]["hash_ids"]), np.array(rows[other]["hash_ids"]))
            longest = min(len(prompts[one]), len(prompts[other]))
            assert shared(prompts[one], prompts[other]) == min(512 * blocks, longest)
    assert workload.requests[0].at_s == 0.0
    assert workload.requests[1].at_s == pytest.approx(24.0)


def test_a_scaled_trace_is_shorter_in_the_same_shape():
    plan = DatasetPlan(
        DatasetKind.TRACE, str(MOONCAKE), requests_max=9, scale_tokens=0.125, context_max=100
    )
    workload, prompts = prompts_of(plan)
    assert len(workload.requests) == 9
    for request, prompt in zip(workload.requests, prompts, strict=True):
        assert len(prompt) + request.answer_tokens <= 100
    assert shared(prompts[0], prompts[1]) == 64


def test_groups_share_their_prefix_and_nothing_else():
    _, prompts = prompts_of(
        DatasetPlan(
            DatasetKind.SHARED_PREFIX,
            requests_max=12,
            groups=3,
            prefix_tokens=64,
            prompt_tokens=20,
        )
    )
    prefixes = {tuple(prompt[:64].tolist()) for prompt in prompts}
    assert len(prefixes) == 3
    assert {shared(a, b) for a in prompts for b in prompts if a is not b} == {0, 64}


def test_each_turn_begins_with_the_whole_conversation_before_it():
    plan = DatasetPlan(
        DatasetKind.MULTI_TURN, requests_max=8, turns=4,
        prefix_tokens=30, prompt_tokens=20, answer_tokens=10,
    )  # fmt: skip
    workload, prompts = prompts_of(plan)
    assert workload.starts == (0, 4)
    assert [request.followers for request in workload.requests[:4]] == [(1,), (2,), (3,), ()]
    for index in (1, 2, 3, 5):
        assert shared(prompts[index - 1], prompts[index]) == len(prompts[index - 1])
        assert len(prompts[index]) == len(prompts[index - 1]) + 30
    assert shared(prompts[0], prompts[4]) == 30


def test_files_of_prompts_are_read_with_their_sessions(tmp_path):
    path = tmp_path / "prompts.jsonl.xz"
    rows = [
        {"prompt": "one", "session": "a", "output_length": 5},
        {"prompt": "two"},
        {"prompt": "three", "session": "a", "think": 2.5},
    ]
    with lzma.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    workload = workload_of(DatasetPlan(DatasetKind.PROMPTS, str(path), answer_tokens=7), 0, 0)
    assert [workload.prompts.prompt(i) for i in range(3)] == ["one", "two", "three"]
    assert [request.answer_tokens for request in workload.requests] == [5, 7, 7]
    assert workload.starts == (0, 1)
    assert workload.requests[0].followers == (2,)
    assert workload.requests[2].think_s == 2.5


def test_conversations_of_sharegpt_are_asked_turn_by_turn(tmp_path):
    path = tmp_path / "talks.json"
    talk = [("human", "hi"), ("gpt", "hello"), ("human", "bye")]
    turns = [{"from": who, "value": text} for who, text in talk]
    path.write_text(json.dumps([{"id": "x", "conversations": turns}]))
    workload = workload_of(DatasetPlan(DatasetKind.SHAREGPT, str(path)), 0, 0)
    assert workload.requests[0].followers == (1,)
    assert workload.prompts.prompt(1) == "User: hi\nAssistant: hello\nUser: bye\nAssistant:"


@pytest.mark.parametrize("kind", [DatasetKind.TRACE, DatasetKind.PROMPTS, DatasetKind.SHAREGPT])
@pytest.mark.parametrize("text", ["", "{}", "[1]", "no json"])
def test_a_file_of_something_else_is_refused_by_name(tmp_path, kind, text):
    path = tmp_path / "it.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=r"^path: "):
        workload_of(DatasetPlan(kind, str(path)), 0, VOCAB)


def test_tokens_need_a_vocabulary():
    with pytest.raises(InvalidInput, match=r"^vocab-size: "):
        workload_of(DatasetPlan(), 0, 0)
