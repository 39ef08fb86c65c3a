"""Bugs of the file tier: wrong KV, too many bytes, the wrong page evicted."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_FORMAT = "mem_cache/page_file.py"
_TIER = "mem_cache/file_tier.py"
_FORMAT_TESTS = ("tests/unit/mem_cache/test_page_file.py",)
_TIER_TESTS = ("tests/unit/mem_cache/test_file_tier.py",)
_COPIES = "mem_cache/host_files.py"
_COPY_TESTS = ("tests/unit/mem_cache/test_kv_cache_files.py",)

FILE_MUTANTS = (
    Mutant(
        "file-checksum-unchecked",
        "What is read from a file is what was written.",
        _FORMAT,
        "return file.read(CHECKSUM_BYTES + 1) == _checksum(header, out)",
        "return len(file.read(CHECKSUM_BYTES + 1)) == CHECKSUM_BYTES",
        _FORMAT_TESTS,
    ),
    Mutant(
        "file-header-unchecked",
        "A file is of the tokens and the layout that are asked for.",
        _FORMAT,
        "if file.read(len(header)) != header or",
        "if len(file.read(len(header))) != len(header) or",
        _FORMAT_TESTS,
    ),
    Mutant(
        "digest-of-one-page",
        "A page is found by all tokens before it, not by its own.",
        _FORMAT,
        "        previous = state.digest()\n        digests.append(previous)\n",
        "        digests.append(state.digest())\n",
        _FORMAT_TESTS,
    ),
    Mutant(
        "digest-without-extra-key",
        "Files are shared only within an extra key.",
        _FORMAT,
        'root = f"{len(page_hash)} {page_hash}{extra_key}".encode()',
        'root = f"{len(page_hash)} {page_hash}".encode()',
        _FORMAT_TESTS,
    ),
    Mutant(
        "corrupt-file-kept",
        "A file that is wrong is removed.",
        _TIER,
        "        self._forget(digest)\n        return False\n\n    def _touch",
        "        return False\n\n    def _touch",
        _TIER_TESTS,
    ),
    Mutant(
        "room-made-afterwards",
        "The bound holds also while a page is written.",
        _TIER,
        "if self._statistics.bytes + size <= self.bytes_max:",
        "if self._statistics.bytes <= self.bytes_max:",
        _TIER_TESTS,
    ),
    Mutant(
        "use-forgotten-at-restart",
        "The least recently used file goes first, whoever used it.",
        _TIER,
        "                if read_page(file, header, out):\n"
        "                    self._stamp(file.fileno())\n",
        "                if read_page(file, header, out):\n",
        _TIER_TESTS,
    ),
    Mutant(
        "half-written-file-kept",
        "What could not be written whole takes up no bytes.",
        _TIER,
        "                self._erase(temporary, size)\n",
        "                pass\n",
        _TIER_TESTS,
    ),
    Mutant(
        "folder-shared",
        "A folder has one worker.",
        _TIER,
        "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)\n",
        _TIER_TESTS,
    ),
    Mutant(
        "unread-pages-used",
        "Pages that could not be read are computed, whatever is in their slots.",
        _COPIES,
        "fetch.key[: (start + fetch.pages_read * self._page_size) * TOKEN_BYTES]",
        "fetch.key",
        _COPY_TESTS,
    ),
    Mutant(
        "fetched-below-a-gap",
        "What a path has on the host is a prefix of it, also when it comes from files.",
        _COPIES,
        "        if above.parent is not None and not above.on_host:\n            return 0\n",
        "",
        _COPY_TESTS,
    ),
    Mutant(
        "beginning-grows-old",
        "Files of a beginning outlive what is of no use without them.",
        _COPIES,
        "        self.files.keep(reversed(before))\n",
        "        del before\n",
        _COPY_TESTS,
    ),
    Mutant(
        "waits-for-a-hanging-disk",
        "No request waits for files without a deadline.",
        _COPIES,
        "        return waiters + self._out_of_patience()\n",
        "        return waiters\n",
        _COPY_TESTS,
    ),
    Mutant(
        "evicted-while-it-is-filed",
        "Host pages on their way to files are locked.",
        _COPIES,
        "            self._tree.host_lock(node)\n",
        "",
        _COPY_TESTS,
    ),
)
