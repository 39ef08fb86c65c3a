"""What `kvferry top` shows, and how it fits a terminal."""

from __future__ import annotations

import pytest

from cluster.cli import main
from cluster.commands.top import screen
from cluster.top_view import account_bar, top_lines
from kvferry.rpc.v1 import inference_pb2 as inference

ACCOUNTS = inference.KvAccounts(
    free=40, evictable=30, protected=10, private=15, inbound=5, total=100
)


def trace(outcome: str, first_s: float, tokens: int, duration_s: float) -> inference.RequestTrace:
    attempt = inference.TraceSpan(name="attempt 1", start_s=0.1)
    attempt.attributes["kvferry.attempt.first_token_s"] = str(first_s)
    span = inference.TraceSpan(name="request", children=[attempt])
    span.attributes["gen_ai.usage.output_tokens"] = str(tokens)
    return inference.RequestTrace(outcome=outcome, duration_s=duration_s, span=span)


def test_a_bar_has_a_cell_for_each_twentieth_and_shows_what_is_small():
    assert account_bar(ACCOUNTS) == "###>==------........"
    assert account_bar(inference.KvAccounts(free=999, private=1, total=1000)) == "#" + 19 * "."
    assert account_bar(inference.KvAccounts()) == ""


def test_workers_and_latencies():
    status = inference.ClusterStatusResponse(
        requests_in_flight=3,
        workers=[
            inference.WorkerSummary(
                worker_id="prefill-0",
                role="prefill",
                reachable=True,
                accounts=ACCOUNTS,
                load=inference.WorkerLoad(running=2, waiting=1, handoffs=4),
            ),
            inference.WorkerSummary(worker_id="decode-0", role="decode"),
        ],
    )
    traces = inference.TracesResponse(
        requests=[trace("succeeded", 0.1, 11, 1.2), trace("failed", 0.3, 0, 1.0)]
    )
    lines = top_lines(status, traces)
    assert "3 requests in flight" in lines[0]
    assert "1 of 2 workers answer" in lines[0]
    assert "first token 300.0 ms, between tokens 100.0 ms (medians), 1 failed" in lines[1]
    (prefill,) = [line for line in lines if line.startswith("prefill-0")]
    assert prefill.split()[2:8] == ["ok", "2", "1", "4", "30", "%"]
    (decode,) = [line for line in lines if line.startswith("decode-0")]
    assert "no answer" in decode


def test_without_requests_nothing_is_claimed():
    lines = top_lines(inference.ClusterStatusResponse(), inference.TracesResponse())
    assert "first token unknown, between tokens unknown" in lines[1]


def test_a_small_terminal_shows_what_fits():
    shown = screen(["abcdef", "ghi", "jkl"], columns=4, rows=2)
    assert "abcd" in shown
    assert "abcde" not in shown
    assert "jkl" not in shown
    assert shown.endswith("\x1b[J")


@pytest.mark.parametrize("value", ["0", "nan", "inf"])
def test_an_interval_that_is_none(value: str, capsys: pytest.CaptureFixture[str]):
    assert main(["top", "--interval-s", value]) == 2
    assert "interval-s" in capsys.readouterr().err
