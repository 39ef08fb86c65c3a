from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from kv_transfer.links.rendezvous import RendezvousStore


def test_entries_are_published_and_taken():
    published = []
    store = RendezvousStore(lambda key, value: published.append((key, value)), 1.0)
    store.set("0/0", "mine")
    store.put("0/1", b"theirs")
    assert published == [("0/0", b"mine")]
    assert [store.get("0/0"), store.get("0/1")] == [b"mine", b"theirs"]


def test_get_waits_for_the_peer():
    store = RendezvousStore(lambda key, value: None, 5.0)
    threading.Timer(0.02, store.put, ("0/1", b"late")).start()
    assert store.get("0/1") == b"late"


def test_waiting_ends_at_its_limit_and_when_closed():
    store = RendezvousStore(lambda key, value: None, 5.0)
    with pytest.raises(RuntimeError, match="no \\['0/1'\\]"):
        store.wait(["0/1"], timedelta(seconds=0.01))
    threading.Timer(0.02, store.close, ("session lost",)).start()
    with pytest.raises(RuntimeError, match="session lost"):
        store.get("0/1")
