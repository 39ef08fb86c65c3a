"""What is asked of Ray for a place, with Ray's own part played by a table."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import ray

from cluster import ray_placement
from cluster.launcher import MemberEnded
from cluster.members import RouterSpec, WorkerSpec
from cluster.ray_placement import RayPlaces
from kvferry.ids import WorkerId
from kvferry.membership import Role
from kvferry.ray_config import PlacementStrategy


class FakeRay:
    """Nodes by address with their CPUs, and the placement groups that were made."""

    def __init__(self, monkeypatch, **nodes):
        self.nodes = {address.replace("_", "."): cpus for address, cpus in nodes.items()}
        self.dead = set()
        self.groups = {}
        context = SimpleNamespace(namespace="blue")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(ray_placement, "_all_nodes", self.all_nodes)
        monkeypatch.setattr(ray_placement, "placement_group", self.make)
        monkeypatch.setattr(ray_placement, "placement_group_table", lambda: self.groups)
        monkeypatch.setattr(ray_placement, "remove_placement_group", self.remove)
        state = SimpleNamespace(available_resources_per_node=self.free)
        monkeypatch.setattr(ray._private, "state", state)

    def all_nodes(self):
        return [
            {"NodeID": f"id-{at}", "NodeManagerAddress": at, "Alive": at not in self.dead}
            for at in self.nodes
        ]

    def free(self):
        return {f"id-{at}": {"CPU": cpus} for at, cpus in self.nodes.items()}

    def make(self, bundles, **how):
        number = f"{len(self.groups):036x}"
        self.groups[number] = {
            "name": how["name"],
            "bundles": dict(enumerate(bundles)),
            "bundles_to_node_id": {0: ""},
            "state": "CREATED",
            "how": how,
        }
        return SimpleNamespace(id=number)

    def remove(self, group):
        number = group.id if isinstance(group.id, str) else group.id.hex()
        self.groups[number]["state"] = "REMOVED"

    def last(self):
        return list(self.groups.values())[-1]


def worker(name, cpus=1.0, **how):
    return WorkerSpec(WorkerId(name), Role(name.partition("-")[0]), cpus, 0.0, 1, **how)


def router(name):
    return RouterSpec(name, "auto", 0, 0)


def test_a_worker_is_pinned_to_the_node_that_is_chosen(monkeypatch):
    fake = FakeRay(monkeypatch, a_1=1.0, b_1=4.0)
    RayPlaces(PlacementStrategy.SPREAD).reserve(worker("decode-0"), 3)
    group = fake.last()
    assert group["bundles"][0] == {"CPU": 1.0, "node:b.1": 0.001}
    assert group["name"] == "kvferry/blue/decode/decode-0/3"
    assert group["how"]["lifetime"] == "detached"


def test_without_room_ray_looks_for_a_node_with_the_labels(monkeypatch):
    fake = FakeRay(monkeypatch, a_1=1.0)
    spec = worker("decode-0", cpus=2.0, labels={"zone": "x"})
    RayPlaces(PlacementStrategy.SPREAD).reserve(spec, 1)
    assert fake.last()["bundles"][0] == {"CPU": 2.0}
    assert fake.last()["how"]["bundle_label_selector"] == [{"zone": "x"}]


def test_who_is_where_is_read_from_ray_and_others_do_not_count(monkeypatch):
    fake = FakeRay(monkeypatch, a_1=4.0, b_1=4.0)
    fake.make([{"CPU": 1.0, "node:b.1": 0.001}], name="kvferry/green/decode/decode-7/1")
    fake.make([{"CPU": 1.0}], name="of somebody else")
    RayPlaces(PlacementStrategy.SPREAD).reserve(worker("decode-0"), 1)
    assert "node:a.1" in fake.last()["bundles"][0]
    RayPlaces(PlacementStrategy.SPREAD).reserve(worker("decode-1"), 1)
    assert "node:b.1" in fake.last()["bundles"][0]


def test_a_place_is_found_again_and_given_back(monkeypatch):
    fake = FakeRay(monkeypatch, a_1=4.0)
    places = RayPlaces(PlacementStrategy.SPREAD)
    places.reserve(worker("decode-0"), 2)
    later = RayPlaces(PlacementStrategy.SPREAD)
    assert later.find("decode-0", 1) is None
    found = later.find("decode-0", 2)
    assert found is not None
    found.release()
    assert fake.last()["state"] == "REMOVED"
    assert later.find("decode-0", 2) is None


def test_a_router_waits_for_its_node_before_it_goes_elsewhere(monkeypatch):
    fake = FakeRay(monkeypatch, a_1=4.0, b_1=4.0, c_1=4.0)
    places = RayPlaces(PlacementStrategy.SPREAD)
    places.reserve(router("router-0"), 1)
    lost = places.reserve(router("router-1"), 1)
    assert fake.last()["bundles"][0] == {"node:b.1": 0.001}
    lost.release()
    fake.dead.add("b.1")
    for launch in range(2, 8):
        with pytest.raises(MemberEnded, match=r"waits for its node b\.1"):
            places.reserve(router("router-1"), launch)
    places.reserve(router("router-1"), 8)
    assert fake.last()["bundles"][0] == {"node:c.1": 0.001}


def test_the_only_router_takes_another_node_at_once(monkeypatch):
    fake = FakeRay(monkeypatch, a_1=4.0, b_1=4.0)
    places = RayPlaces(PlacementStrategy.SPREAD)
    places.reserve(router("router-0"), 1).release()
    fake.dead.add("a.1")
    places.reserve(router("router-0"), 2)
    assert fake.last()["bundles"][0] == {"node:b.1": 0.001}


def test_a_later_supervisor_gives_back_what_the_dead_had_and_knows_where_they_were(monkeypatch):
    fake = FakeRay(monkeypatch, a_1=4.0, b_1=4.0, c_1=4.0)
    former = RayPlaces(PlacementStrategy.SPREAD)
    for spec in (worker("decode-0"), router("router-0"), router("router-1")):
        former.reserve(spec, 1)
    lost = fake.last()
    (address,) = [name.removeprefix("node:") for name in lost["bundles"][0]]
    later = RayPlaces(PlacementStrategy.SPREAD)
    later.release_dead({("decode-0", 1), ("router-0", 1)})
    assert lost["state"] == "REMOVED"
    assert later.find("decode-0", 1) is not None
    fake.dead.add(address)
    with pytest.raises(MemberEnded, match=f"waits for its node {re.escape(address)}"):
        later.reserve(router("router-1"), 2)
    fake.dead.clear()
    later.reserve(router("router-1"), 3)
    assert fake.last()["bundles"][0] == {f"node:{address}": 0.001}


def test_a_later_supervisor_knows_where_the_living_are(monkeypatch):
    fake = FakeRay(monkeypatch, a_1=4.0, b_1=4.0, c_1=4.0)
    former = RayPlaces(PlacementStrategy.SPREAD)
    former.reserve(router("router-0"), 1)
    former.reserve(router("router-1"), 1)
    later = RayPlaces(PlacementStrategy.SPREAD)
    found = later.find("router-1", 1)
    assert found is not None
    fake.dead.add("b.1")
    found.release()
    with pytest.raises(MemberEnded, match=r"waits for its node b\.1"):
        later.reserve(router("router-1"), 2)
