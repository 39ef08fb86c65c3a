"""Workers cut off from one another, from everybody, or behind a bad network, at each step."""

from __future__ import annotations

import pytest

from tests.support.fault_plan import network_faults

pytestmark = pytest.mark.cluster

IN_CI = {
    "cut-3s-at-source-streaming-hold",
    "cut-3s-at-sink-settling-hold",
    "loss-2s-at-source-streaming-hold",
    "delay-2s-at-sink-receiving-hold",
    "isolate-sink-3s-at-sink-receiving-hold",
    "kill-source-at-source-streaming-hold",
}
"""A sample that takes about a minute."""

FAULTS = {str(fault): fault for fault in network_faults()}
assert FAULTS.keys() >= IN_CI, IN_CI - FAULTS.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in FAULTS],
)
def test_network_fault(many_hosts, name):
    many_hosts.suffer(FAULTS[name])
