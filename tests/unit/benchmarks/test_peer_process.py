"""A peer in a process of its own: asked, standing still, refused, lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peer_process import PeerKind, PeerProcess, PeerUnavailable
from tests.support.waiting import wait_until

FLOAT32, HALF = Path("float32"), Path("float16")


@pytest.fixture
def kind(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".ready").touch()
    return PeerKind("fake", str(tmp_path), "tests.support.fake_peer")


@pytest.fixture
def peer(kind):
    made = PeerProcess(kind, FLOAT32, 2)
    yield made
    made.close()


def state_of(peer):
    stat = Path(f"/proc/{peer._process.pid}/stat").read_text(encoding="utf-8")
    return stat.rpartition(")")[2].split()[0]


def test_it_reports_itself_and_times_its_own_steps(peer):
    assert peer.report == {"version": "1", "dtype": "float32", "threads": 2}
    step = peer.decode(8, 128)
    assert all(0.0 <= step() < peer.ready_s for _ in range(3))
    assert peer.prefill(16)() >= 0.0


def test_it_stands_still_while_it_is_not_its_turn(peer):
    wait_until("stopped", lambda: state_of(peer) == "T", state=lambda: state_of(peer))
    peer.prefill(16)()
    wait_until("stopped again", lambda: state_of(peer) == "T", state=lambda: state_of(peer))


def test_a_peer_that_fails_says_why(peer):
    step = peer.decode(99, 1)
    with pytest.raises(PeerUnavailable, match=r"fake has ended:(.|\n)*no room for 99"):
        step()
    peer.close()
    peer.close()


@pytest.mark.parametrize(
    ("model", "problem"),
    [(HALF, "dtype is 'float16', not 'float32'")],
)
def test_what_it_computes_in_is_checked(kind, model, problem):
    with pytest.raises(PeerUnavailable, match=problem):
        PeerProcess(kind, model, 2)


def test_a_peer_that_is_not_installed_names_the_command(kind, tmp_path):
    (tmp_path / ".ready").unlink()
    with pytest.raises(PeerUnavailable, match="fake is not installed: `make bench-peers-setup`"):
        PeerProcess(kind, FLOAT32, 2)
