"""SIGKILL, SIGSTOP and SIGCONT of either side at each step of the protocol, under load."""

from __future__ import annotations

import pytest

from tests.support.fault_plan import process_faults

pytestmark = pytest.mark.cluster

IN_CI = {
    "kill-source-at-source-queued-hold",
    "kill-sink-at-source-offered-hold",
    "kill-source-at-source-streaming-trace",
    "kill-sink-at-source-streaming-hold",
    "kill-source-at-source-completed-hold",
    "kill-sink-at-source-closed-hold",
    "kill-source-at-sink-requested-hold",
    "kill-sink-at-sink-reserving-hold",
    "kill-source-at-sink-receiving-hold",
    "kill-sink-at-sink-settling-hold",
    "kill-sink-at-sink-decoding-trace",
    "kill-source-at-sink-waiting-hold",
    "freeze-sink-1s-at-source-streaming-hold",
    "freeze-source-1s-at-sink-receiving-trace",
}
"""A sample that takes about a minute."""

FAULTS = {str(fault): fault for fault in process_faults()}
assert FAULTS.keys() >= IN_CI, IN_CI - FAULTS.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in FAULTS],
)
def test_process_fault(one_host, name):
    one_host.suffer(FAULTS[name])
