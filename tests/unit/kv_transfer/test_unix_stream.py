from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from kv_transfer.links.unix_stream import RecordStream, accept, dial, is_same_user, listen

TIMEOUT_S = 5.0

_STRANGER = """
import os, socket, sys
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.connect(b"\\0kvferry-" + sys.argv[1].encode())
print("connected", flush=True)
print(connection.recv(1))
"""


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def test_our_own_processes_are_let_in():
    listener, address = listen(TIMEOUT_S)
    dialed = dial(address, TIMEOUT_S)
    accepted = accept(listener)
    assert is_same_user(dialed)
    assert is_same_user(accepted)
    for each in (listener, dialed, accepted):
        each.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_sent_away():
    listener, address = listen(TIMEOUT_S)
    stranger = subprocess.Popen(
        [sys.executable, "-c", _STRANGER, address], stdout=subprocess.PIPE, text=True
    )
    assert stranger.stdout.readline() == "connected\n"
    dialed = dial(address, TIMEOUT_S)
    accepted = accept(listener)
    dialed.send(b"x")
    assert accepted.recv(1) == b"x"
    assert stranger.communicate(timeout=TIMEOUT_S)[0] == "b''\n"
    for each in (listener, dialed, accepted):
        each.close()


def test_accepting_ends_in_time():
    listener, _ = listen(0.02)
    with pytest.raises(TimeoutError, match="nobody"):
        accept(listener)
    listener.close()


def test_accepting_is_ended_by_shutdown():
    listener, _ = listen(TIMEOUT_S)
    timer = threading.Timer(0.02, listener.shutdown, (socket.SHUT_RDWR,))
    timer.start()
    with pytest.raises(OSError, match="Invalid argument"):
        accept(listener)
    timer.join()
    listener.close()


def test_addresses_differ_and_nobody_listens_at_a_closed_one():
    (one, first), (other, second) = listen(TIMEOUT_S), listen(TIMEOUT_S)
    assert first != second
    assert len(first) == 32
    one.close()
    other.close()
    with pytest.raises(ConnectionRefusedError):
        dial(first, TIMEOUT_S)


def test_records_come_whole_however_they_are_sent(ends):
    one, other = ends
    stream = RecordStream(other, 4, TIMEOUT_S)
    assert stream.receive(block=False) == ()
    one.send(b"aaa")
    assert stream.receive(block=False) == ()
    one.send(b"abbbbccccd")
    assert stream.receive(block=True) == [b"aaaa", b"bbbb", b"cccc"]
    one.send(b"ddd")
    assert stream.receive(block=True) == [b"dddd"]


def test_a_closed_peer_is_an_error_after_what_it_sent(ends):
    one, other = ends
    stream = RecordStream(other, 4, TIMEOUT_S)
    one.send(b"aaaa")
    one.close()
    assert stream.receive(block=True) == [b"aaaa"]
    for block in (True, False):
        with pytest.raises(ConnectionError):
            stream.receive(block=block)


def test_a_peer_that_left_before_it_read_everything_is_gone_like_any_other(ends):
    one, other = ends
    stream = RecordStream(other, 4, TIMEOUT_S)
    stream.send(b"aaaa")
    one.close()
    with pytest.raises(ConnectionError, match="is gone"):
        stream.receive(block=True)


def test_sending_to_a_peer_that_does_not_read_ends_in_time(ends):
    stream = RecordStream(ends[0], 4, 0.05)
    with pytest.raises(BlockingIOError):
        stream.send(bytes(2**22))
