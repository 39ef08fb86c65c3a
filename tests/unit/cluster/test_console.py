from __future__ import annotations

import io

import pytest

from cluster import console
from kvferry.rpc.v1 import inference_pb2 as inference


class FakeClient:
    """Answers calls with what it was given, and remembers the requests."""

    def __init__(self, audits=(), texts=()):
        self.audits = audits
        self.texts = iter(texts)
        self.requests = []

    def audit(self, worker_id):
        self.requests.append(worker_id)
        return inference.AuditResponse(audits=self.audits)

    def generate(self, request):
        copy = inference.GenerateRequest()
        copy.CopyFrom(request)
        self.requests.append(copy)
        usage = inference.Usage(prompt_tokens=9, prefill_hit_tokens=2, host_hit_tokens=4)
        samples = range(max(1, request.sampling.n))
        for index in samples:
            yield inference.GenerateResponse(text=next(self.texts), index=index)
        for index in reversed(samples):
            finish = inference.Finish(usage=None if index else usage)
            yield inference.GenerateResponse(finish=finish, index=index)


def right(name):
    report = inference.AuditReport(duration_ms=1.25, engine_steps=7)
    report.accounts.total = 64
    return inference.WorkerAudit(worker_id=name, report=report)


def wrong(name, *violations):
    report = inference.AuditReport(violations=violations)
    return inference.WorkerAudit(worker_id=name, report=report)


def test_an_audit_that_finds_nothing_is_a_table(capsys):
    client = FakeClient([right("decode-0"), right("prefill-0")])
    console.audit(client, "")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["decode-0", "right", "64", "0", "7", "1.2", "ms"],
        ["prefill-0", "right", "64", "0", "7", "1.2", "ms"],
    ]
    assert client.requests == [""]


def test_violations_are_printed_and_fail(capsys):
    client = FakeClient([right("decode-0"), wrong("prefill-0", "check 1: a", "check 8: b")])
    with pytest.raises(console.AuditFailed, match=r"^violations in: prefill-0$"):
        console.audit(client, "")
    out = capsys.readouterr().out
    assert "prefill-0  2 wrong" in out
    assert out.splitlines()[-2:] == ["prefill-0: check 1: a", "prefill-0: check 8: b"]


def test_a_worker_that_could_not_be_checked_fails_too(capsys):
    lost = inference.WorkerAudit(worker_id="decode-1", failure="no answer")
    with pytest.raises(console.AuditFailed, match=r"^could not be checked: decode-1$"):
        console.audit(FakeClient([right("decode-0"), lost]), "")
    *_, row, reason = capsys.readouterr().out.splitlines()
    assert row == "decode-1  not checked"
    assert reason == "decode-1: no answer"


def test_no_worker_is_no_success():
    with pytest.raises(console.AuditFailed, match="no workers"):
        console.audit(FakeClient(), "")


def test_each_turn_of_a_chat_sends_the_conversation_and_the_wishes(capsys):
    client = FakeClient(texts=["one", "two"])
    request = inference.GenerateRequest(cache_salt="tenant", priority=3)
    console.chat(client, request, io.StringIO("a\nb\n\n"))
    first, second = client.requests
    assert [turn.content for turn in first.chat.messages] == ["a"]
    assert [turn.content for turn in second.chat.messages] == ["a", "one", "b"]
    assert {(each.cache_salt, each.priority) for each in client.requests} == {("tenant", 3)}
    assert "one\n" in capsys.readouterr().out


@pytest.mark.parametrize("raw", [True, False])
def test_one_prompt_is_sent_as_text_or_as_a_turn(raw, capsys):
    client = FakeClient(texts=["answer"])
    request = inference.GenerateRequest(priority=-3)
    console.generate(client, "hello", request, raw=raw, show_usage=True)
    (sent,) = client.requests
    assert sent.text == ("hello" if raw else "")
    assert [turn.content for turn in sent.chat.messages] == ([] if raw else ["hello"])
    assert sent.priority == -3
    printed = capsys.readouterr()
    assert printed.out == "answer\n"
    assert "9 prompt tokens (2 hit at prefill, 4 loaded back, 0 hit at decode)" in printed.err


def test_several_answers_are_printed_below_their_numbers(capsys):
    client = FakeClient(texts=["one", "two"])
    request = inference.GenerateRequest(sampling=inference.SamplingParams(n=2))
    console.generate(client, "hello", request, raw=True, show_usage=True)
    printed = capsys.readouterr()
    assert printed.out == "--- 0 ---\none\n--- 1 ---\ntwo\n"
    assert "9 prompt tokens" in printed.err
