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
