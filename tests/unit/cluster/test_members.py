from __future__ import annotations

import pytest

from cluster.members import RouterSpec, WorkerSpec, cpus_wanted, members_of
from kvferry.config import load_config
from kvferry.membership import Role


def specs_for(**overrides):
    return members_of(
        load_config(None, {}, {k.replace("__", "."): v for k, v in overrides.items()})
    )


def test_default_is_one_router_one_prefill_one_decode():
    specs = specs_for()
    assert [spec.name for spec in specs] == ["router-0", "prefill-0", "decode-0"]


def test_each_worker_takes_what_its_group_says():
    specs = specs_for(
        workers__prefill__count="2", workers__prefill__cpus="1.5", workers__prefill__threads="2"
    )
    workers = [spec for spec in specs if isinstance(spec, WorkerSpec)]
    assert [(spec.name, spec.cpus, spec.threads) for spec in workers] == [
        ("prefill-0", 1.5, 2),
        ("prefill-1", 1.5, 2),
        ("decode-0", 1.0, 1),
    ]
    assert cpus_wanted(specs) == 4.0


def test_aggregated_workers_have_the_role_both():
    specs = specs_for(
        workers__prefill__count="0", workers__decode__count="0", workers__both__count="1"
    )
    assert [spec.role for spec in specs if isinstance(spec, WorkerSpec)] == [Role.BOTH]


def test_replicas_are_routers_that_may_have_the_ports_of_one_another():
    routers = [spec for spec in specs_for(router__replicas="3") if isinstance(spec, RouterSpec)]
    assert [spec.name for spec in routers] == ["router-0", "router-1", "router-2"]
    assert [routers[1].ports_of(attempt) for attempt in range(routers[1].port_tries)] == [
        (50051, 50052),
        (50053, 50054),
        (50055, 50056),
    ]


def test_a_free_port_is_free_in_every_attempt():
    assert RouterSpec("router-0", "auto", 0, 0, port_tries=2).ports_of(1) == (0, 0)


def test_workers_carry_what_their_node_must_have():
    specs = specs_for(workers__decode__resources="{fast: 1}", workers__decode__labels="{zone: x}")
    (decode,) = [s for s in specs if isinstance(s, WorkerSpec) and s.role is Role.DECODE]
    assert (decode.resources, decode.labels) == ({"fast": 1.0}, {"zone": "x"})


def test_the_router_gets_its_address_from_the_configuration():
    router = specs_for(router__port="0", router__host="0.0.0.0")[0]
    assert router == RouterSpec("router-0", "0.0.0.0", 0, 0)


@pytest.mark.parametrize(
    ("ports", "http_port"),
    [
        ({"router__port": "7000"}, 7001),
        ({"router__port": "0"}, 0),
        ({"router__port": "7000", "router__http__port": "80"}, 80),
        ({"router__port": "0", "router__http__port": "80"}, 80),
    ],
)
def test_the_port_of_http_follows_that_of_grpc_unless_it_is_set(ports, http_port):
    router = specs_for(**ports)[0]
    assert isinstance(router, RouterSpec)
    assert router.http_port == http_port
