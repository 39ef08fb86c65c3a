"""KV pages in files of one folder: the third tier, below device and host.

A page is found by the digest of all that it depends on (`page_digests`), so a folder can outlive
the process, the tree and the configuration: what doesn't fit is not found, and grows old.

    folder/lock             held as long as a `FileTier` is open
    folder/ab/abcdef...     a page; the name is its digest in hex
    folder/ab/abcdef....tmp a page being written

A file gets its name after its last byte, so kill -9 leaves whole files, and temporary ones that
the next start removes. Power loss may leave torn ones, since nothing is synced: each read checks
the file against its checksum. What is wrong is removed and was never there: a page that cannot
be read is computed again, so no trouble with the disk is fatal after the start.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from kvferry.errors import ConfigError
from mem_cache.page_file import file_bytes, page_header, read_page, write_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import BufferedWriter
    from pathlib import Path

    import torch

    PageBytes: TypeAlias = memoryview | torch.Tensor
    """uint8 [page_bytes], contiguous, on the host."""

_LOG = logging.getLogger(__name__)
_DIRECTORY, _BOUND = "cache.host.files.directory", "cache.host.files.bytes_max"
_FOLDER_NAME = re.compile("[0-9a-f]{2}")
"""256 folders: 10^6 files are 4,000 in each."""
_PAGE_NAME = re.compile("[0-9a-f]{64}")
_TEMPORARY = ".tmp"


@dataclass(slots=True)
class FileTierStatistics:
    """What became of the calls since the folder was opened, and what it holds."""

    hits: int = 0
    """Pages read."""
    misses: int = 0
    """Reads that gave nothing, for whatever reason."""
    corrupt: int = 0
    """Files that were not what their name promised; removed."""
    read_errors: int = 0
    written: int = 0
    write_errors: int = 0
    evicted: int = 0
    files: int = 0
    bytes: int = 0
    """Charged against the bound: of files, the one being written, and what cannot be removed."""


class FileTier:
    """A content-addressed store of KV pages, bounded in bytes; the least recently used go first.

    Threads: `put`, `get`, `keep` and `close` do I/O and belong to one thread, the copier's. `has`
    and `statistics` may be called by any thread at any time and do none; a lock guards what they
    see. So a page that `has` promised may be gone when `get` asks for it: that is a miss.
    """

    def __init__(self, directory: Path, page_hash: str, page_bytes: int, bytes_max: int) -> None:
        if page_bytes > bytes_max:
            raise ConfigError(_BOUND, f"is {bytes_max}; one page has {page_bytes} bytes")
        self.directory = directory
        self.page_bytes = page_bytes
        self.bytes_max = bytes_max
        self._page_hash = page_hash
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        """Bytes of each file by digest, least recently used first."""
        self._statistics = FileTierStatistics()
        self._latest_ns = 0
        self._is_writing_well = True
        self._lock_file = _lock_folder(directory)
        try:
            self._scan()
        except OSError as error:
            self._lock_file.close()
            raise ConfigError(_DIRECTORY, f"{directory} cannot be used: {error}") from error

    # --- any thread -------------------------------------------------------------------------

    def has(self, digest: bytes) -> bool:
        """Whether there is a file for this page. O(1), no I/O."""
        with self._lock:
            return digest in self._sizes

    def statistics(self) -> FileTierStatistics:
        """A copy of the counters."""
        with self._lock:
            return replace(self._statistics, files=len(self._sizes))

    # --- the copier's thread ----------------------------------------------------------------

    def put(self, digest: bytes, tokens: bytes, page: PageBytes) -> None:
        """Keep a page, or mark it as used if it's there. Trouble is counted, logged and survived.

        `tokens` are the page's own, little-endian int32. Older pages make room first.
        """
        if self.has(digest) and self._touch(digest):
            return
        payload = self._view(page)
        header = page_header(self._page_hash, digest, tokens, self.page_bytes)
        size = file_bytes(header, self.page_bytes)
        if not self._make_room(size):
            self._write_failed(f"no room for {size} bytes")
            return
        path = self._path(digest)
        temporary = path.with_name(path.name + _TEMPORARY)
        is_begun = False
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with temporary.open("wb") as file:
                is_begun = True
                write_page(file, header, payload)
                file.flush()
                self._stamp(file.fileno())
            temporary.replace(path)
        except OSError as error:
            # What never came to be takes no room, and cannot always be unlinked either.
            if is_begun:
                self._erase(temporary, size)
            else:
                self._uncharge(size)
            self._write_failed(str(error))
            return
        self._is_writing_well = True
        with self._lock:
            self._sizes[digest] = size
            self._statistics.written += 1

    def get(self, digest: bytes, tokens: bytes, out: PageBytes) -> bool:
        """Read a page into `out`. On False, a miss, `out` may hold anything.

        A file whose digest, layout, tokens, length or checksum are not as asked is removed.
        """
        is_hit = self.has(digest) and self._read(digest, tokens, self._view(out))
        with self._lock:
            if is_hit:
                self._statistics.hits += 1
                self._sizes.move_to_end(digest)
            else:
                self._statistics.misses += 1
        return is_hit

    def keep(self, digests: Iterable[bytes]) -> None:
        """Mark the pages as used that are there, for others that are of no use without them."""
        for digest in digests:
            if self.has(digest):
                self._touch(digest)

    def close(self) -> None:
        """Let others use the folder. Nothing else may be called afterwards."""
        self._lock_file.close()

    # --- inside -----------------------------------------------------------------------------

    def _read(self, digest: bytes, tokens: bytes, out: memoryview) -> bool:
        header = page_header(self._page_hash, digest, tokens, self.page_bytes)
        try:
            with self._path(digest).open("rb") as file:
                if read_page(file, header, out):
                    self._stamp(file.fileno())
                    return True
        except OSError as error:
            _LOG.warning("KV page %s cannot be read: %s", digest.hex(), error)
            with self._lock:
                self._statistics.read_errors += 1
        else:
            _LOG.warning("KV page %s is not what its name promises", digest.hex())
            with self._lock:
                self._statistics.corrupt += 1
        self._forget(digest)
        return False

    def _touch(self, digest: bytes) -> bool:
        """Mark a page as used; False if its file turns out to be gone."""
        try:
            self._stamp(self._path(digest))
        except OSError as error:
            _LOG.warning("KV page %s cannot be touched: %s", digest.hex(), error)
            self._forget(digest)
            return False
        with self._lock:
            self._sizes.move_to_end(digest)
        return True

    def _stamp(self, file: int | Path) -> None:
        """Make a file the most recently used one, also in the eyes of the next process.

        By modification times that only grow: the system's are equal within milliseconds.
        """
        os.utime(file)
        self._latest_ns = max(os.stat(file).st_mtime_ns, self._latest_ns + 1)
        os.utime(file, ns=(self._latest_ns, self._latest_ns))

    def _make_room(self, size: int) -> bool:
        """Charge `size` bytes before they are written, so that the bound holds at all times."""
        if size > self.bytes_max:
            return False
        while True:
            with self._lock:
                if self._statistics.bytes + size <= self.bytes_max:
                    self._statistics.bytes += size
                    return True
                if not self._sizes:
                    return False
                oldest = next(iter(self._sizes))
                self._statistics.evicted += 1
            self._forget(oldest)

    def _forget(self, digest: bytes) -> None:
        """Remove a page."""
        with self._lock:
            size = self._sizes.pop(digest)
        self._erase(self._path(digest), size)

    def _erase(self, path: Path, size: int) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            # Still on the disk, so still charged.
            _LOG.warning("%s cannot be removed: %s", path, error)
            return
        self._uncharge(size)

    def _uncharge(self, size: int) -> None:
        with self._lock:
            self._statistics.bytes -= size

    def _write_failed(self, reason: str) -> None:
        with self._lock:
            self._statistics.write_errors += 1
        # A full disk stays full for a while: told once, counted always.
        if self._is_writing_well:
            _LOG.warning("KV pages cannot be written below %s: %s", self.directory, reason)
        self._is_writing_well = False

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.directory / name[:2] / name

    def _view(self, page: PageBytes) -> memoryview:
        view = page if isinstance(page, memoryview) else page.numpy().data
        assert view.nbytes == self.page_bytes, f"{view.nbytes} bytes are no page"
        return view.cast("B")

    def _scan(self) -> None:
        """Learn what an earlier process left; remove what it didn't finish, and what is too much.

        One walk, no file is opened. Files with names that aren't ours are left alone.
        """
        found: list[tuple[int, bytes, int]] = []
        for entry in _files_below(self.directory):
            if entry.name.endswith(_TEMPORARY):
                os.unlink(entry.path)
                continue
            stat = entry.stat()
            found.append((stat.st_mtime_ns, bytes.fromhex(entry.name), stat.st_size))
        for mtime_ns, digest, size in sorted(found):
            self._sizes[digest] = size
            self._statistics.bytes += size
            self._latest_ns = mtime_ns
        self._make_room(0)


def _files_below(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Every page, whole or temporary."""
    with os.scandir(directory) as folders:
        for folder in folders:
            if _FOLDER_NAME.fullmatch(folder.name) is None or not folder.is_dir():
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    if _PAGE_NAME.fullmatch(entry.name.removesuffix(_TEMPORARY)) is not None:
                        yield entry


def _lock_folder(directory: Path) -> BufferedWriter:
    """Make the folder and hold it for as long as the returned file is open."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (directory / "lock").open("wb")
    except OSError as error:
        raise ConfigError(_DIRECTORY, f"{directory} cannot be used: {error}") from error
    try:
        # The system lets go of it when the process ends, however it ends.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        is_taken = isinstance(error, BlockingIOError)
        problem = "is used by another worker" if is_taken else f"cannot be locked: {error}"
        raise ConfigError(_DIRECTORY, f"{directory} {problem}") from error
    return file
