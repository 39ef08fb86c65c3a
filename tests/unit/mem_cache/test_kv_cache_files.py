"""The file tier as requests see it: what the host had survives it, and even the process."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.clock import ManualClock
from kvferry.config import WritePolicy
from kvferry.errors import ConfigError
from kvferry.ids import ExtraKey
from mem_cache.host_files import FETCH_PATIENCE_S
from tests.support.kv_caches import (
    PAGE_SIZES,
    SHARED,
    assert_reads_its_tokens,
    compute,
    tiered_cache,
    tokens_of,
)
from tests.support.manual_copier import ManualCopier


@pytest.fixture
def make_scene(tmp_path):
    made = []

    def make(page_size=4, **options):
        made.append(Scene(tmp_path, page_size, **options))
        return made[-1]

    yield make
    for scene in made:
        scene.cache.close()


every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


class Scene:
    """A worker with files in one folder. `restart` loses all memory and keeps the files."""

    def __init__(self, directory, page_size=4, **options):
        self.directory, self.size, self.options = directory, page_size, options
        self._start()

    def _start(self):
        self.copier, self.disk = ManualCopier(), ManualCopier()
        self.cache = tiered_cache(
            self.size, self.copier, files=(self.directory, self.disk), **self.options
        )

    def restart(self):
        self.cache.close()
        self._start()

    def pages(self, first, count):
        return tokens_of(range(1000 * first, 1000 * first + count * self.size + 1))

    def publish(self, text):
        kv = self.cache.open("publisher", text, SHARED)
        compute(self.cache, kv, text, len(text))
        self.cache.release(kv, text)
        self.settle()

    def settle(self):
        """Let all copies end, also those that follow from others."""
        ended = []
        while self.cache.copies_in_flight:
            self.disk.run_all()
            self.copier.run_all()
            ended += self.cache.poll()
        return ended

    def files(self):
        return sorted(path for path in self.directory.glob("??/*"))


@every_page_size
def test_what_was_published_is_there_after_a_restart(page_size, make_scene):
    scene = make_scene(page_size)
    text = scene.pages(1, 3)
    scene.publish(text)
    whole = len(text) - 1
    published = len(text) if page_size == 1 else whole
    assert len(scene.files()) == published // page_size
    scene.restart()
    cache = scene.cache
    kv = cache.open("a", text, SHARED)
    assert kv.prefix_len == 0
    assert cache.load_back(kv, text) == whole
    assert (cache.host_accounts().loading, cache.accounts().loading) == (whole, 0)
    assert (kv.loading_len, kv.loading_slots, cache.held_slots([kv])) == (whole, 0, 0)
    scene.disk.run()
    assert cache.poll() == []
    assert (cache.host_accounts().loading, cache.accounts().loading) == (0, whole)
    scene.copier.run()
    assert cache.poll() == [kv]
    assert (kv.prefix_len, kv.host_hit_len) == (whole, whole)
    assert_reads_its_tokens(cache, kv, text)


def test_other_extra_keys_find_nothing(make_scene):
    scene = make_scene()
    text = scene.pages(1, 3)
    scene.publish(text)
    scene.restart()
    kv = scene.cache.open("a", text, ExtraKey("tenant"))
    assert scene.cache.load_back(kv, text) == 0


def test_files_of_a_beginning_in_use_outlive_what_hangs_on_it(make_scene):
    """Requests find it in memory; after a restart the rest is of no use without it."""
    scene = make_scene(host_pages=64)
    beginning = scene.pages(1, 2)[:-1]
    scene.publish(np.append(beginning, np.int32(7)))
    (size,) = {file.stat().st_size for file in scene.files()}
    scene.options["files_bytes_max"] = 8 * size
    scene.restart()
    for number in range(2, 12):
        text = np.concatenate([beginning, scene.pages(number, 2)])
        scene.publish(text)
    assert scene.cache.counters["file_tier_evicted"] > 0
    scene.restart()
    kv = scene.cache.open("a", text, SHARED)
    assert scene.cache.load_back(kv, text) == len(text) - 1
    scene.settle()
    assert_reads_its_tokens(scene.cache, kv, text)


def test_a_match_goes_on_from_device_to_host_to_files(make_scene):
    scene = make_scene()
    text = scene.pages(1, 4)
    scene.publish(text)
    scene.restart()
    for pages in (2, 3):
        part = text[: pages * 4 + 1]
        kv = scene.cache.open("a", part, SHARED)
        scene.cache.load_back(kv, part)
        scene.settle()
        scene.cache.release(kv, None)
    scene.cache.tier.tree.before_eviction = lambda node: None
    filler = scene.cache.open("filler", tokens_of([1]), ExtraKey("filler"))
    scene.cache.extend(filler, 6 * 4)
    scene.cache.release(filler, None)
    kv = scene.cache.open("b", text, SHARED)
    assert kv.prefix_len == 8
    assert scene.cache.load_back(kv, text) == 8, "a page on the host, one in files"
    assert scene.settle() == [kv]
    assert kv.prefix_len == 16
    assert_reads_its_tokens(scene.cache, kv, text)


@pytest.mark.parametrize("page", range(3))
def test_a_corrupt_file_ends_in_computing(page, make_scene):
    scene = make_scene()
    text = scene.pages(1, 3)
    for pages in (1, 2, 3):
        before = set(scene.files())
        scene.publish(text[: 4 * pages + 1])
        if pages == page + 1:
            (file,) = set(scene.files()) - before
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
    scene.restart()
    kv = scene.cache.open("a", text, SHARED)
    assert scene.cache.load_back(kv, text) == 12
    assert scene.settle() == [kv]
    assert kv.prefix_len == 4 * page
    compute(scene.cache, kv, text, len(text))
    assert_reads_its_tokens(scene.cache, kv, text)
    assert scene.cache.tier.files.files.statistics().corrupt == 1


def test_a_second_request_joins_the_fetch_of_the_first(make_scene):
    scene = make_scene()
    text = scene.pages(1, 3)
    scene.publish(text)
    scene.restart()
    a, b = (scene.cache.open(name, text, SHARED) for name in "ab")
    assert scene.cache.load_back(a, text) == scene.cache.load_back(b, text) == 12
    assert scene.cache.copies_in_flight == 1
    assert scene.settle() == [a, b]
    for kv in (a, b):
        assert_reads_its_tokens(scene.cache, kv, text)


def test_a_host_too_small_takes_what_it_can_from_the_left(make_scene):
    scene = make_scene(host_pages=8)
    text = scene.pages(1, 4)
    scene.publish(text)
    scene.options["host_pages"] = 3
    scene.restart()
    kv = scene.cache.open("a", text, SHARED)
    assert scene.cache.load_back(kv, text) == 12
    assert scene.settle() == [kv]
    assert kv.prefix_len == 12
    assert_reads_its_tokens(scene.cache, kv, text)


def test_who_joins_a_fetch_is_told_of_no_more_than_it_wants(make_scene):
    scene = make_scene()
    text = scene.pages(1, 3)
    scene.publish(text)
    scene.restart()
    a, b = scene.cache.open("a", text, SHARED), scene.cache.open("b", text[:6], SHARED)
    assert scene.cache.load_back(a, text) == 12
    assert scene.cache.load_back(b, text[:6]) == 4
    assert sorted(kv.request_id for kv in scene.settle()) == ["a", "b"]
    assert (a.prefix_len, b.prefix_len) == (12, 4)


def test_a_fetch_goes_on_without_its_request_and_holds_host_slots_only(make_scene):
    scene = make_scene()
    text = scene.pages(1, 3)
    scene.publish(text)
    scene.restart()
    kv = scene.cache.open("a", text, SHARED)
    scene.cache.load_back(kv, text)
    scene.cache.release(kv, None)
    assert scene.cache.accounts().free == scene.cache.num_slots
    assert scene.settle() == []
    assert scene.cache.host_accounts().evictable == 12
    assert scene.cache.host_accounts().is_idle


def test_a_disk_that_hangs_lets_requests_compute(make_scene, caplog):
    scene = make_scene()
    text, other = scene.pages(1, 3), scene.pages(2, 3)
    scene.publish(text)
    scene.publish(other)
    scene.restart()
    cache, clock = scene.cache, ManualClock()
    cache.tier.files.clock = clock
    kvs = [cache.open(name, text, SHARED) for name in ("a", "b")]
    assert [cache.load_back(kv, text) for kv in kvs] == [12, 12]
    clock.advance(FETCH_PATIENCE_S - 0.001)
    assert cache.poll() == []
    clock.advance(0.001)
    assert cache.poll() == kvs
    assert [kv.loading_len for kv in kvs] == [0, 0]
    assert "3 pages of KV did not come from files" in caplog.text
    compute(cache, kvs[0], text, len(text))
    assert cache.poll() == []
    third = cache.open("c", other, SHARED)
    assert cache.load_back(third, other) == 0, "nobody waits behind a fetch that is overdue"
    for kv in (*kvs, third):
        cache.release(kv, None)
    assert scene.settle() == []
    kv = cache.open("d", other, SHARED)
    assert cache.load_back(kv, other) == 12, "the disk works again"
    assert scene.settle() == [kv]
    assert_reads_its_tokens(cache, kv, other)
    assert cache.host_accounts().is_idle


def test_tokens_published_by_another_meanwhile_are_not_hung_twice(make_scene):
    scene = make_scene()
    text = scene.pages(1, 3)
    scene.publish(text)
    scene.restart()
    kv, other = scene.cache.open("a", text, SHARED), scene.cache.open("b", text, SHARED)
    scene.cache.load_back(kv, text)
    compute(scene.cache, other, text, 8)
    scene.cache.checkpoint(other, text[:8])
    scene.copier.run_all()
    assert scene.cache.poll() == []
    scene.disk.run(0)
    scene.settle()
    assert kv.prefix_len == 12
    assert_reads_its_tokens(scene.cache, kv, text)
    assert scene.cache.host_accounts().is_idle


def test_pages_on_their_way_to_files_stay_on_the_host(make_scene):
    scene = make_scene(host_pages=4)
    text = scene.pages(1, 3)
    kv = scene.cache.open("a", text, SHARED)
    compute(scene.cache, kv, text, len(text))
    scene.cache.release(kv, text)
    scene.copier.run_all()
    scene.cache.poll()
    accounts = scene.cache.host_accounts()
    assert (accounts.protected, accounts.free) == (12, 4)
    other = scene.pages(2, 3)
    kv = scene.cache.open("b", other, SHARED)
    compute(scene.cache, kv, other, len(other))
    scene.cache.release(kv, other)
    assert scene.cache.tier.statistics.skipped == 12
    scene.settle()
    assert scene.cache.host_accounts().evictable == 12
    assert len(scene.files()) == 3


def test_nothing_is_fetched_below_what_the_host_lacks(make_scene):
    """A fetched page must not leave a gap on the host."""
    scene = make_scene()
    text = scene.pages(1, 3)
    scene.publish(text)
    scene.restart()
    first = scene.cache.open("a", text[:9], SHARED)
    compute(scene.cache, first, text[:9], 9)
    scene.cache.release(first, text[:9])
    kv = scene.cache.open("b", text, SHARED)
    assert (kv.prefix_len, scene.cache.load_back(kv, text)) == (8, 0)
    scene.settle()
    scene.cache.release(kv, None)
    kv = scene.cache.open("c", text, SHARED)
    assert scene.cache.load_back(kv, text) == 4


def test_with_write_back_files_get_what_was_evicted(make_scene):
    scene = make_scene(write_policy=WritePolicy.WRITE_BACK)
    text = scene.pages(1, 3)
    scene.publish(text)
    assert scene.files() == []
    filler = scene.cache.open("filler", tokens_of([1]), ExtraKey("filler"))
    scene.cache.extend(filler, 8 * 4)
    scene.settle()
    assert len(scene.files()) == 3


def test_a_copy_of_many_bytes_is_several_copies(make_scene, monkeypatch):
    monkeypatch.setattr("mem_cache.host_files.SPILL_BYTES_MAX", 1)
    scene = make_scene()
    text = scene.pages(1, 3)
    kv = scene.cache.open("a", text, SHARED)
    compute(scene.cache, kv, text, len(text))
    scene.cache.release(kv, text)
    scene.copier.run_all()
    scene.cache.poll()
    assert scene.cache.copies_in_flight == 3
    scene.settle()
    scene.restart()
    kv = scene.cache.open("b", text, SHARED)
    scene.cache.load_back(kv, text)
    scene.settle()
    assert_reads_its_tokens(scene.cache, kv, text)
    assert kv.prefix_len == 12


def test_a_bug_in_the_file_tier_is_not_swallowed(make_scene):
    scene = make_scene()
    text = scene.pages(1, 3)
    scene.publish(text)
    scene.restart()
    scene.cache.load_back(scene.cache.open("a", text, SHARED), text)
    scene.disk.run(error=AssertionError("no page"))
    with pytest.raises(AssertionError, match="no page"):
        scene.cache.poll()


def test_two_workers_never_share_a_folder(make_scene):
    scene = make_scene()
    with pytest.raises(ConfigError, match=r"cache\.host\.files\.directory"):
        make_scene()
    scene.restart()
