from __future__ import annotations

import pytest

from cluster.members import WorkerSpec
from cluster.placement import (
    NodeRoom,
    Placed,
    bundle_of,
    choose_node,
    choose_router_node,
    nodes_with_room,
)
from kvferry.ids import WorkerId
from kvferry.membership import Role
from kvferry.ray_config import PlacementStrategy

SPREAD, PACK, PAIR = PlacementStrategy.SPREAD, PlacementStrategy.PACK, PlacementStrategy.PAIR


def node(address, cpus=4.0, labels=None, **resources):
    return NodeRoom(f"id-{address}", address, {"CPU": cpus, **resources}, labels or {})


def worker(name, role=Role.DECODE, cpus=1.0, **how):
    return WorkerSpec(WorkerId(name), role, cpus, how.pop("gpus", 0.0), 1, **how)


def place_all(nodes, specs, strategy):
    """Where each worker goes, one after the other, in nodes with room for all."""
    placed: list[Placed] = []
    for spec in specs:
        chosen = choose_node(nodes, spec, placed, strategy)
        assert chosen is not None
        placed.append(Placed(spec.name, chosen.address, spec.role))
    return {each.name: each.address for each in placed}


NODES = [node("a"), node("b"), node("c")]
TWO_AND_TWO = [
    worker("prefill-0", Role.PREFILL),
    worker("prefill-1", Role.PREFILL),
    worker("decode-0"),
    worker("decode-1"),
]


def test_spread_keeps_workers_of_one_role_apart_then_all_of_them():
    found = place_all(NODES, TWO_AND_TWO, SPREAD)
    assert found["prefill-0"] != found["prefill-1"]
    assert found["decode-0"] != found["decode-1"]
    assert set(found.values()) == {"a", "b", "c"}


def test_pack_leaves_nodes_empty():
    assert set(place_all(NODES, TWO_AND_TWO, PACK).values()) == {"a"}


def test_pack_goes_on_where_there_is_room():
    small = [node("a", cpus=0.5), node("b")]
    assert place_all(small, [worker("decode-0")], PACK) == {"decode-0": "b"}


def test_pair_puts_each_decode_worker_beside_a_prefill_worker():
    found = place_all(NODES, TWO_AND_TWO, PAIR)
    assert found["prefill-0"] != found["prefill-1"]
    assert {found["decode-0"], found["decode-1"]} == {found["prefill-0"], found["prefill-1"]}


def test_pair_without_a_partner_spreads():
    found = place_all(NODES, [worker("decode-0"), worker("decode-1")], PAIR)
    assert found["decode-0"] != found["decode-1"]


def test_only_nodes_with_room_are_chosen():
    nodes = [node("a", cpus=0.9), node("b", cpus=1.0)]
    chosen = choose_node(nodes, worker("decode-0"), [], SPREAD)
    assert chosen is not None
    assert chosen.address == "b"
    assert choose_node(nodes, worker("decode-0", cpus=2.0), [], SPREAD) is None


def test_gpus_resources_and_labels_count():
    nodes = [node("a"), node("b", GPU=1.0), node("c", 4.0, {"zone": "x"}, fast=1.0)]
    wishes = {
        "b": worker("decode-0", gpus=1.0),
        "c": worker("decode-0", resources={"fast": 1.0}),
    }
    for address, spec in wishes.items():
        chosen = choose_node(nodes, spec, [], SPREAD)
        assert chosen is not None
        assert chosen.address == address
    chosen = choose_node(nodes, worker("decode-0", labels={"zone": "x"}), [], SPREAD)
    assert chosen is not None
    assert chosen.address == "c"
    assert choose_node(nodes, worker("decode-0", labels={"zone": "y"}), [], SPREAD) is None


def test_a_worker_returns_to_its_node_if_that_is_as_good_as_another():
    chosen = choose_node(NODES, worker("decode-0"), [], SPREAD, former="b")
    assert chosen is not None
    assert chosen.address == "b"
    taken = [Placed("decode-1", "b", Role.DECODE)]
    chosen = choose_node(NODES, worker("decode-0"), taken, SPREAD, former="b")
    assert chosen is not None
    assert chosen.address != "b"


@pytest.mark.parametrize(
    ("spec", "bundle"),
    [
        (worker("decode-0"), {"CPU": 1.0}),
        (worker("decode-0", cpus=0.0, gpus=2.0), {"GPU": 2.0}),
        (worker("decode-0", resources={"fast": 0.5}), {"CPU": 1.0, "fast": 0.5}),
    ],
)
def test_a_bundle_has_what_the_worker_reserves(spec, bundle):
    assert bundle_of(spec) == bundle


def test_a_bundle_is_never_empty():
    assert bundle_of(worker("decode-0", cpus=0.0))["CPU"] > 0.0


def test_routers_keep_apart_then_away_from_workers():
    placed = [Placed("router-0", "a", None), Placed("decode-0", "b", Role.DECODE)]
    chosen = choose_router_node(NODES, "router-1", placed)
    assert chosen is not None
    assert chosen.address == "c"
    assert choose_router_node([], "router-1", placed) is None


def test_a_router_stays_where_its_clients_look_for_it():
    placed = [Placed("router-0", "a", None)]
    chosen = choose_router_node(NODES, "router-0", placed, former="a")
    assert chosen is not None
    assert chosen.address == "a"
    chosen = choose_router_node([node("a"), node("c")], "router-1", placed, former="b")
    assert chosen is not None
    assert chosen.address == "c"


def test_a_router_that_reserves_something_goes_where_some_of_it_is_left():
    pods = [node("a"), node("b", pod=1.0), node("c", pod=0.0)]
    assert [each.address for each in nodes_with_room(pods, {"pod": 1.0})] == ["b"]
    assert nodes_with_room(pods, {"pod": 2.0}) == ()
    assert nodes_with_room(pods, {}) == tuple(pods)
