"""What the flags of `kvferry bench run` become."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.plan import (
    Arrivals,
    DatasetKind,
    Door,
    check_plan,
    plan_of_json,
    plan_to_json,
)
from bench.record import LoadMode, Targets
from cluster.cli import build_parser
from cluster.commands.bench_run import part_of, plan_of, start_of
from cluster.commands.run_records import targets_of
from kvferry.errors import InvalidInput


def plan(*flags: str):
    return plan_of(build_parser().parse_args(["bench", "run", *flags]))


def test_flags_become_a_plan_that_travels():
    made = plan(
        *("--address", "a:1,b:2", "--dataset", "multi-turn", "--turns", "3", "--load", "closed"),
        *("--concurrency", "7", "--arrivals", "gamma", "--part", "2/4", "--seed", "5"),
    )
    assert made.endpoint.door is Door.GRPC
    assert made.endpoint.addresses == ("a:1", "b:2")
    assert (made.dataset.kind, made.dataset.turns) == (DatasetKind.MULTI_TURN, 3)
    assert (made.load.mode, made.load.concurrency) == (LoadMode.CLOSED, 7)
    assert made.load.arrivals is Arrivals.GAMMA
    assert (made.part, made.parts, made.seed) == (1, 4, 5)
    assert plan_of_json(plan_to_json(made)) == made


def test_a_url_is_another_door():
    made = plan("--http", "http://x/v1", "--tls-ca", "ca.pem")
    assert made.endpoint.door is Door.HTTP
    assert made.endpoint.addresses == ("http://x/v1",)
    assert made.endpoint.tls_ca == "ca.pem"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("rate", "0"),
        ("rate", "nan"),
        ("requests", "-1"),
        ("time-scale", "inf"),
        ("length-spread", "1"),
        ("think-s", "-1"),
        ("concurrency", "0"),
        ("dataset", "novels"),
        ("load", "heavy"),
        ("arrivals", "late"),
        ("part", "0/2"),
        ("part", "3/2"),
        ("part", "one"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_flag(flag, value):
    with pytest.raises(InvalidInput) as caught:
        check_plan(plan(f"--{flag}", value))
    assert caught.value.field == flag


def test_a_plan_of_no_clients_is_refused():
    with pytest.raises(InvalidInput, match=r"^clients: "):
        check_plan(replace(plan(), parts=0))


def test_targets_have_units():
    assert targets_of("ttft=2s,itl=100ms") == Targets(2.0, 0.1)
    assert targets_of("") is None
    for text in ("ttft=2s", "ttft=2,itl=1s", "ttft=0s,itl=1s", "ttft=xs,itl=1s", "a=1s,b=1s"):
        with pytest.raises(InvalidInput, match=r"^targets: "):
            targets_of(text)


def test_a_start_is_a_moment_and_not_a_time_somewhere():
    assert start_of("1767323045.5") == 1767323045.5
    assert start_of("2026-01-02T03:04:05+00:00") == 1767323045.0
    assert start_of("") is None
    for text in ("2026-01-02T03:04:05", "soon"):
        with pytest.raises(InvalidInput, match=r"^start-at: "):
            start_of(text)


def test_parts_are_counted_from_one_by_people():
    assert part_of("1/1") == (0, 1)
    assert part_of("3/3") == (2, 3)
