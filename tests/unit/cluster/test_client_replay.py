from __future__ import annotations

import random

import pytest

from cluster.client_replay import AnswerChanged, Replay
from kvferry.rpc.v1 import inference_pb2 as inference

LENGTH = inference.FINISH_REASON_LENGTH


def part(tokens=(), text="", index=0, ends=False, usage=None):
    response = inference.GenerateResponse(token_ids=tokens, text=text, index=index)
    if tokens and index == 0:
        for token in tokens:
            response.logprobs.add().chosen.token_id = token
    if ends or usage is not None:
        response.finish.reason = LENGTH
    if usage is not None:
        response.finish.usage.completion_tokens = usage
    return response


def passed(replay, *responses):
    return [new for response in responses for new in replay.fresh(response)]


def joined(parts, index=0):
    mine = [each for each in parts if each.index == index]
    return (
        [token for each in mine for token in each.token_ids],
        "".join(each.text for each in mine),
        [entry.chosen.token_id for each in mine for entry in each.logprobs],
        sum(each.HasField("finish") for each in mine),
    )


def test_an_undisturbed_answer_passes_as_it_is():
    answer = [part([1], "a"), part([2, 3], "bc"), part(usage=3)]
    replay = Replay(1)
    assert passed(replay, *answer) == answer
    assert replay.is_complete
    assert list(replay.rest()) == []


@pytest.mark.parametrize("seed", range(40))
def test_an_answer_cut_anywhere_and_chunked_otherwise_comes_once(seed):
    rng = random.Random(seed)
    tokens, text = list(range(100, 120)), "abcdefghijklmnopqrst"

    def chunked():
        at, held = 0, 0
        while at < len(tokens):
            size = rng.randrange(1, 5)
            # Text may lag behind its tokens, where it could become a stop string.
            upto = min(len(tokens), at + size) - rng.randrange(2)
            upto = max(held, upto)
            yield part(tokens[at : at + size], text[held:upto])
            at, held = at + size, upto
        yield part([], text[held:], usage=20)

    replay, got = Replay(1), []
    for _ in range(rng.randrange(1, 4)):
        whole = list(chunked())
        got += passed(replay, *whole[: rng.randrange(len(whole))])
        assert not replay.is_complete
        replay.begin_again()
    got += passed(replay, *chunked())
    assert joined(got) == (tokens, text, tokens, 1)
    assert got[-1].finish.usage.completion_tokens == 20
    assert replay.is_complete


@pytest.mark.parametrize("other", [part([1, 9], "ab"), part([1, 2], "aX")])
def test_another_answer_is_an_error(other):
    replay = Replay(1)
    passed(replay, part([1, 2], "ab"))
    replay.begin_again()
    with pytest.raises(AnswerChanged):
        passed(replay, other)


def test_samples_that_end_in_another_order_have_one_end_each_and_the_usage_last():
    replay = Replay(2)
    got = passed(replay, part([1], "a", 0), part([5], "x", 1), part(index=0, ends=True))
    replay.begin_again()
    got += passed(
        replay,
        part([1], "a", 0),
        part([5, 6], "xy", 1),
        part(index=1, ends=True),
    )
    assert not replay.is_complete
    got += passed(replay, part(index=0, usage=3))
    assert joined(got, 0) == ([1], "a", [1], 1)
    assert joined(got, 1) == ([5, 6], "xy", [], 1)
    assert got[-1].finish.usage.completion_tokens == 3
    assert got[-1].index == 1
    assert replay.is_complete


def test_progress_is_what_is_new():
    replay = Replay(1)
    passed(replay, part([1], "a"))
    replay.begin_again()
    passed(replay, part([1], "a"))
    assert replay.progress == 1
    passed(replay, part([2], "b"))
    assert replay.progress == 2
