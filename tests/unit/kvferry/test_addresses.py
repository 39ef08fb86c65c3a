from __future__ import annotations

import pytest

from kvferry.addresses import host_to_announce, host_to_bind


@pytest.mark.parametrize(
    ("setting", "bound", "announced"),
    [
        ("auto", "10.0.0.7", "10.0.0.7"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0", "10.0.0.7"),
    ],
)
def test_a_host_is_the_node_s_unless_it_is_set(setting, bound, announced):
    assert host_to_bind(setting, "10.0.0.7") == bound
    assert host_to_announce(setting, "10.0.0.7") == announced
