import errno
import logging
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from kvferry.errors import ConfigError
from mem_cache import file_tier
from mem_cache.file_tier import FileTier, FileTierStatistics

LAYOUT = "0123456789abcdef"
PAGE_BYTES = 1000
FILE_BYTES = 96 + 16 + PAGE_BYTES + 32
"""Header, four tokens, payload, checksum."""


def digest(number: int) -> bytes:
    """All in one folder of two hex digits, the worst case."""
    return bytes([0xAB]) + number.to_bytes(31, "big")


def tokens(number: int) -> bytes:
    return number.to_bytes(4, "little") * 4


def page(number: int) -> bytes:
    return bytes([number % 251]) * PAGE_BYTES


class Folder:
    """A folder, and what is seen through the tier that has it open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tier = self._open(10)

    def _open(self, room: int, layout=LAYOUT) -> FileTier:
        return FileTier(self.path, layout, PAGE_BYTES, room * FILE_BYTES)

    def reopen(self, room=10, layout=LAYOUT) -> None:
        self.tier.close()
        self.tier = self._open(room, layout)

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.tier.put(digest(number), tokens(number), memoryview(page(number)))

    def get(self, number: int) -> bytes | None:
        out = bytearray(PAGE_BYTES)
        is_hit = self.tier.get(digest(number), tokens(number), memoryview(out))
        return bytes(out) if is_hit else None

    def there(self) -> set[int]:
        return {number for number in range(100) if self.tier.has(digest(number))}

    def file(self, number: int) -> Path:
        return self.path / "ab" / digest(number).hex()

    def files(self) -> set[str]:
        return {path.name for path in self.path.rglob("*") if path.is_file()} - {"lock"}

    def bytes_on_disk(self) -> int:
        return sum((self.path / "ab" / name).stat().st_size for name in self.files())


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path / "worker" / "kv")
    yield folder
    folder.tier.close()


# --- pages --------------------------------------------------------------------------------------


def test_a_page_reads_back_also_after_a_restart(folder):
    folder.put(1, 2)
    assert folder.there() == {1, 2}
    assert (folder.get(1), folder.get(2), folder.get(3)) == (page(1), page(2), None)
    assert folder.tier.statistics() == FileTierStatistics(
        hits=2, misses=1, written=2, files=2, bytes=2 * FILE_BYTES
    )
    folder.reopen()
    assert (folder.get(1), folder.get(2)) == (page(1), page(2))
    assert folder.bytes_on_disk() == folder.tier.statistics().bytes == 2 * FILE_BYTES


def test_pages_are_tensors_as_well(folder):
    written = torch.arange(PAGE_BYTES, dtype=torch.int64).to(torch.uint8)
    folder.tier.put(digest(1), tokens(1), written)
    # A page of a pool, which is a part of a larger tensor.
    pool = torch.zeros((3, PAGE_BYTES), dtype=torch.uint8)
    assert folder.tier.get(digest(1), tokens(1), pool[1])
    assert torch.equal(pool[1], written)
    assert not pool[::2].any()


def test_a_page_has_exactly_its_bytes(folder):
    with pytest.raises(AssertionError, match="no page"):
        folder.tier.put(digest(1), tokens(1), memoryview(bytes(PAGE_BYTES - 1)))
    folder.put(1)
    with pytest.raises(AssertionError, match="no page"):
        folder.tier.get(digest(1), tokens(1), memoryview(bytearray(PAGE_BYTES + 1)))


def test_a_page_that_is_there_is_not_written_again(folder):
    folder.put(1)
    inode = folder.file(1).stat().st_ino
    folder.put(1)
    assert folder.file(1).stat().st_ino == inode
    assert folder.tier.statistics().written == 1


# --- what is wrong is a miss --------------------------------------------------------------------


@pytest.mark.parametrize(
    "position",
    [0, 15, 16, 20, 24, 31, 32, 63, 64, 95, 96, 111, 112, 600, 1111, 1112, 1143],
)
def test_a_changed_file_is_a_miss_and_removed(folder, position, caplog):
    """Magic, version, both lengths, layout, digest, tokens, payload and checksum."""
    folder.put(1, 2)
    content = bytearray(folder.file(1).read_bytes())
    content[position] ^= 1
    folder.file(1).write_bytes(content)
    assert folder.get(1) is None
    assert folder.there() == {2}
    assert folder.files() == {digest(2).hex()}
    assert folder.tier.statistics() == FileTierStatistics(
        misses=1, corrupt=1, written=2, files=1, bytes=FILE_BYTES
    )
    assert "not what its name promises" in caplog.text
    folder.put(1)
    assert folder.get(1) == page(1)


@pytest.mark.parametrize("length", [0, 50, 96, 112, 700, FILE_BYTES - 1, FILE_BYTES + 1])
def test_a_file_of_another_length_is_a_miss_and_removed(folder, length):
    folder.put(1)
    os.truncate(folder.file(1), length)
    folder.reopen()
    assert folder.tier.statistics().bytes == length
    assert folder.get(1) is None
    assert folder.files() == set()
    assert (folder.tier.statistics().corrupt, folder.tier.statistics().bytes) == (1, 0)


def test_other_tokens_than_asked_are_a_miss(folder):
    folder.put(1)
    out = memoryview(bytearray(PAGE_BYTES))
    assert not folder.tier.get(digest(1), tokens(2), out)
    assert folder.files() == set()


def test_a_page_under_another_ones_name_is_a_miss(folder):
    folder.put(1)
    folder.file(1).rename(folder.file(2))
    folder.reopen()
    assert folder.there() == {2}
    out = memoryview(bytearray(PAGE_BYTES))
    assert not folder.tier.get(digest(2), tokens(1), out)


def test_a_page_of_another_layout_is_a_miss(folder):
    folder.put(1)
    folder.reopen(layout="fedcba9876543210")
    assert folder.get(1) is None
    assert folder.files() == set()


def test_a_file_that_vanished_is_a_miss_and_written_anew(folder):
    folder.put(1, 2)
    folder.file(1).unlink()
    folder.file(2).unlink()
    assert folder.get(1) is None
    folder.put(2)
    assert folder.get(2) == page(2)
    statistics = folder.tier.statistics()
    assert (statistics.read_errors, statistics.corrupt, statistics.bytes) == (1, 0, FILE_BYTES)


def test_an_unreadable_file_is_a_miss(folder):
    folder.put(1)
    folder.file(1).unlink()
    folder.file(1).mkdir()
    assert folder.get(1) is None
    assert folder.there() == set()
    assert folder.tier.statistics().read_errors == 1
    # A folder cannot be unlinked, so it is not known to be gone.
    assert folder.tier.statistics().bytes == FILE_BYTES


# --- the bound ----------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(folder):
    folder.put(*range(10))
    folder.get(0)
    folder.put(1)
    folder.put(10, 11, 12)
    assert folder.there() == {0, 1, 5, 6, 7, 8, 9, 10, 11, 12}
    assert folder.files() == {digest(number).hex() for number in folder.there()}
    assert folder.tier.statistics().evicted == 3


def test_what_is_kept_goes_later_and_what_is_gone_does_not_matter(folder):
    folder.put(*range(10))
    folder.file(3).unlink()
    folder.tier.keep([digest(1), digest(3), digest(50), digest(0)])
    folder.put(10, 11, 12)
    assert folder.there() == {0, 1, 5, 6, 7, 8, 9, 10, 11, 12}
    folder.reopen(room=5)
    assert folder.there() == {0, 1, 10, 11, 12}


def test_use_is_remembered_over_a_restart(folder):
    folder.put(*range(10))
    folder.reopen()
    folder.get(2)
    folder.put(0)
    folder.reopen()
    folder.put(10, 11, 12)
    assert folder.there() == {0, 2, 5, 6, 7, 8, 9, 10, 11, 12}


def test_use_after_a_restart_is_later_even_if_the_clock_went_back(folder):
    folder.put(1, 2)
    in_a_year = folder.file(2).stat().st_mtime_ns + 365 * 86_400 * 10**9
    os.utime(folder.file(2), ns=(in_a_year, in_a_year))
    folder.reopen()
    folder.put(3)
    folder.reopen(room=2)
    assert folder.there() == {2, 3}


def test_a_smaller_bound_holds_from_the_start(folder):
    folder.put(*range(10))
    folder.reopen(room=4)
    assert folder.there() == {6, 7, 8, 9}
    assert folder.bytes_on_disk() == 4 * FILE_BYTES


def test_the_bound_holds_while_a_page_is_written(folder, monkeypatch):
    folder.put(*range(10))
    seen = []
    write_page = file_tier.write_page

    def watched(file, header, payload):
        write_page(file, header, payload)
        file.flush()
        seen.append(folder.bytes_on_disk())

    monkeypatch.setattr(file_tier, "write_page", watched)
    folder.put(10, 11)
    assert seen == [10 * FILE_BYTES] * 2


def test_a_file_that_cannot_be_removed_stays_charged(folder):
    folder.put(*range(10))
    folder.file(0).unlink()
    folder.file(0).mkdir()
    folder.put(10)
    assert folder.there() == {2, 3, 4, 5, 6, 7, 8, 9, 10}
    assert folder.tier.statistics().bytes == 10 * FILE_BYTES


def test_one_page_must_fit(tmp_path):
    with pytest.raises(ConfigError, match=r"cache\.host\.files\.bytes_max"):
        FileTier(tmp_path, LAYOUT, PAGE_BYTES, PAGE_BYTES - 1)
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_fits_but_for_its_header_is_not_written(tmp_path):
    tier = FileTier(tmp_path, LAYOUT, PAGE_BYTES, FILE_BYTES - 1)
    tier.put(digest(1), tokens(1), memoryview(page(1)))
    assert not tier.has(digest(1))
    assert tier.statistics() == FileTierStatistics(write_errors=1)
    tier.close()


# --- a start ------------------------------------------------------------------------------------


def test_what_was_being_written_is_removed_and_other_files_are_left_alone(folder):
    folder.put(1)
    temporary = folder.file(2).with_name(digest(2).hex() + ".tmp")
    temporary.write_bytes(b"half a page")
    (folder.path / "abc").mkdir()
    notes = [folder.path / name for name in ("ab/notes.tmp", "README", "abc/README", "cd")]
    for note in notes:
        note.write_text("not a page")
    folder.reopen()
    assert not temporary.exists()
    assert all(note.exists() for note in notes)
    assert folder.there() == {1}
    assert folder.tier.statistics().bytes == FILE_BYTES


def test_two_workers_never_share_a_folder(folder):
    with pytest.raises(ConfigError, match="is used by another worker") as caught:
        FileTier(folder.path, LAYOUT, PAGE_BYTES, FILE_BYTES)
    assert caught.value.field == "cache.host.files.directory"
    folder.reopen()


def test_the_folder_is_free_when_its_holder_is_closed(folder):
    folder.tier.close()
    FileTier(folder.path, LAYOUT, PAGE_BYTES, FILE_BYTES).close()


def test_a_folder_that_cannot_be_is_told_with_its_setting(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be used: .*Not a directory") as caught:
        FileTier(tmp_path / "file" / "kv", LAYOUT, PAGE_BYTES, FILE_BYTES)
    assert caught.value.field == "cache.host.files.directory"


def test_a_failed_start_does_not_keep_the_folder(tmp_path):
    cannot_be_removed = tmp_path / "7f" / (64 * "7" + ".tmp")
    cannot_be_removed.mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be used"):
        FileTier(tmp_path, LAYOUT, PAGE_BYTES, FILE_BYTES)
    cannot_be_removed.rmdir()
    FileTier(tmp_path, LAYOUT, PAGE_BYTES, FILE_BYTES).close()


# --- trouble with the disk ----------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch):
    """Half a page can be written, then the disk is full. Called to have room again."""
    write_page = file_tier.write_page

    def fails(file, header, payload):
        file.write(header)
        file.write(payload[: len(payload) // 2])
        file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_tier, "write_page", fails)
    return lambda: monkeypatch.setattr(file_tier, "write_page", write_page)


def test_a_full_disk_is_counted_and_told_once_and_survived(folder, full_disk, caplog):
    caplog.set_level(logging.WARNING)
    folder.put(1, 2, 3)
    assert folder.there() == folder.files() == set()
    assert folder.tier.statistics() == FileTierStatistics(write_errors=3)
    assert [record.message for record in caplog.records] == [
        f"KV pages cannot be written below {folder.path}: [Errno 28] No space left on device"
    ]
    full_disk()
    folder.put(1)
    assert folder.get(1) == page(1)


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 300 blocks."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1200k", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_really_full_disk(tiny_disk):
    tier = FileTier(tiny_disk, LAYOUT, 5 * PAGE_BYTES, 10**9)
    for number in range(200):
        tier.put(digest(number), tokens(number), memoryview(page(number) * 5))
    statistics = tier.statistics()
    assert 0 < statistics.files == 200 - statistics.write_errors < 200
    assert statistics.bytes == statistics.files * (FILE_BYTES + 4 * PAGE_BYTES)
    assert len(list((tiny_disk / "ab").iterdir())) == statistics.files
    out = bytearray(5 * PAGE_BYTES)
    assert tier.get(digest(0), tokens(0), memoryview(out))
    assert out == page(0) * 5
    tier.close()


def test_a_subfolder_that_cannot_be_fails_the_write_only(folder):
    (folder.path / "ab").write_text("in the way")
    folder.put(1)
    assert folder.there() == set()
    assert folder.tier.statistics().write_errors == 1
    assert folder.tier.statistics().bytes == 0, "nothing was written"


def test_a_folder_that_somebody_emptied_is_used_on(folder):
    folder.put(1)
    folder.file(1).unlink()
    (folder.path / "ab").rmdir()
    folder.put(2)
    assert (folder.get(1), folder.get(2)) == (None, page(2))


# --- threads ------------------------------------------------------------------------------------


def test_others_may_ask_what_is_there_while_pages_come_and_go(folder):
    stop, seen = threading.Event(), []

    def ask():
        while not stop.is_set():
            seen.append(len(folder.there()))
            assert folder.tier.statistics().bytes <= 10 * FILE_BYTES

    thread = threading.Thread(target=ask)
    thread.start()
    for number in range(60):
        folder.put(number)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(seen) > 0
    assert folder.there() == set(range(50, 60))
