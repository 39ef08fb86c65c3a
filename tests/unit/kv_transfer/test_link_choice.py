from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.links import choice
from kv_transfer.links.choice import build_factories, choose_transport, host_fingerprint
from kv_transfer.protocol.messages import Hello
from kvferry.config import HandoffConfig, TransportChoice
from kvferry.ids import Incarnation, WorkerId

HELLO = Hello(WorkerId("w1"), Incarnation(1), "layout", 4096, heads=3)


def test_processes_of_one_host_share_memory():
    host = host_fingerprint(HandoffConfig())
    assert host == host_fingerprint(HandoffConfig())
    one, other = replace(HELLO, host=host), replace(HELLO, host=host)
    assert choose_transport(one, other) == "shared_memory"


def test_others_do_not():
    host = host_fingerprint(HandoffConfig())
    assert choose_transport(replace(HELLO, host=host), replace(HELLO, host=host + "x")) == "gloo"
    assert choose_transport(replace(HELLO, host=host), HELLO) == "gloo"
    assert choose_transport(HELLO, HELLO) == "gloo"


def test_the_network_may_be_chosen_always():
    host = host_fingerprint(HandoffConfig(transport=TransportChoice.GLOO))
    assert choose_transport(replace(HELLO, host=host), replace(HELLO, host=host)) == "gloo"


def test_devices_meet_over_nccl_and_never_a_host():
    device = replace(HELLO, host=host_fingerprint(HandoffConfig(), on_cuda=True))
    assert host_fingerprint(HandoffConfig(transport=TransportChoice.GLOO), on_cuda=True) == ""
    host = replace(HELLO, host=host_fingerprint(HandoffConfig()))
    assert choose_transport(device, device) == "nccl"
    assert choose_transport(device, host) == choose_transport(host, device) == "gloo"


@pytest.mark.parametrize("what", ["boot", "network", "user"])
def test_another_kernel_network_or_user_is_another_host(what, monkeypatch, tmp_path):
    before = host_fingerprint(HandoffConfig())
    match what:
        case "boot":
            (tmp_path / "boot_id").write_text("another\n")
            monkeypatch.setattr(choice, "_BOOT_ID", tmp_path / "boot_id")
        case "network":
            (tmp_path / "net").symlink_to("net:[1]")
            monkeypatch.setattr(choice, "_NETWORK", tmp_path / "net")
        case "user":
            monkeypatch.setattr(choice.os, "geteuid", lambda: 12345)
    assert host_fingerprint(HandoffConfig()) != before


def test_every_choice_has_a_factory():
    assert set(build_factories(HandoffConfig(), "127.0.0.1")) == {"gloo", "shared_memory"}
    assert set(build_factories(HandoffConfig(), "127.0.0.1", on_cuda=True)) == {"gloo", "nccl"}
