from __future__ import annotations

import contextlib
import json

import pytest

from cluster import cli
from cluster.client import CallFailed
from cluster.commands import look
from kvferry.rpc.v1 import inference_pb2 as inference


class FakeClient:
    """A cluster without workers, with other requests at each look; None: it does not answer."""

    def __init__(self, *in_flight):
        self.in_flight = list(in_flight)

    def model_info(self):
        return inference.ModelInfoResponse(model="small")

    def cluster_status(self):
        found = self.in_flight.pop(0)
        if found is None:
            raise CallFailed("no answer yet")
        return inference.ClusterStatusResponse(requests_in_flight=found)


@pytest.fixture
def pauses(monkeypatch):
    """Each ends at once; after the third the user has seen enough."""
    taken = []

    def pause(seconds):
        taken.append(seconds)
        if len(taken) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(look.time, "sleep", pause)
    return taken


def with_client(monkeypatch, *in_flight):
    client = contextlib.nullcontext(FakeClient(*in_flight))
    monkeypatch.setattr(look, "client_of", lambda arguments: client)


def test_a_status_is_one_json_line(monkeypatch, capsys):
    with_client(monkeypatch, 4)
    cli.main(["status", "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["requests_in_flight"] == 4


def test_a_watch_goes_on_over_what_is_not_answered_until_interrupted(monkeypatch, pauses, capsys):
    with_client(monkeypatch, 1, None, 3)
    cli.main(["status", "--json", "--watch", "--interval-s", "5"])
    told = capsys.readouterr()
    assert [json.loads(line)["requests_in_flight"] for line in told.out.splitlines()] == [1, 3]
    assert told.err == "no answer yet\n"
    assert pauses == [5.0, 5.0, 5.0]


def test_tables_are_watched_too(monkeypatch, pauses, capsys):
    with_client(monkeypatch, 1, 2, 3)
    cli.main(["status", "--watch"])
    out = capsys.readouterr().out
    assert [f"{count} requests in flight" in out for count in (1, 2, 3)] == [True, True, True]
    assert "\x1b" not in out  # What is no terminal gets no signs for one.


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf"])
def test_an_interval_that_is_none_is_refused(interval, capsys):
    assert cli.main(["status", "--watch", "--interval-s", interval]) == 2
    assert "interval-s: is" in capsys.readouterr().err
