import hashlib
import io

import numpy as np
import pytest

from kvferry.ids import ExtraKey
from mem_cache.page_file import file_bytes, page_digests, page_header, read_page, write_page


def tokens_of(ids):
    return np.fromiter(ids, dtype=np.int32)


NO_KEY = ExtraKey("")
PAGE = bytes(range(200)) * 5
TOKENS = tokens_of([7, 8, 9, 10]).tobytes()
PAGE_BYTES = len(PAGE)
DIGEST = bytes(range(32))


def header(page_hash="layout", digest=DIGEST, tokens=TOKENS, page_bytes=PAGE_BYTES):
    return page_header(page_hash, digest, tokens, page_bytes)


def written() -> bytes:
    raw = io.BytesIO()
    file = io.BufferedWriter(raw)
    write_page(file, header(), memoryview(PAGE))
    file.flush()
    return raw.getvalue()


def reads(content, wanted):
    """The payload, or None if the file is not what is wanted."""
    out = bytearray(len(PAGE))
    is_whole = read_page(io.BufferedReader(io.BytesIO(content)), wanted, memoryview(out))
    return bytes(out) if is_whole else None


def test_a_page_reads_back_and_its_length_is_known_before():
    assert reads(written(), header()) == PAGE
    assert len(written()) == file_bytes(header(), len(PAGE)) == 96 + len(TOKENS) + len(PAGE) + 32


def test_the_checksum_is_of_everything_before_it():
    content = written()
    assert content[-32:] == hashlib.sha256(content[:-32]).digest()


@pytest.mark.parametrize(
    "other",
    [
        {"page_hash": "other"},
        {"digest": bytes(32)},
        {"tokens": tokens_of([7, 8, 9, 11]).tobytes()},
        {"tokens": TOKENS[:-4]},
        {"page_bytes": PAGE_BYTES - 1},
    ],
    ids=["layout", "digest", "tokens", "fewer tokens", "length"],
)
def test_a_page_of_something_else_is_not_read(other):
    assert reads(written(), header(**other)) is None


def test_no_single_byte_may_change():
    content = written()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 0x10
        assert reads(bytes(changed), header()) is None, position


@pytest.mark.parametrize("length", [0, 1, 95, 96, 111, 112, 113, 1111, 1112, 1113, 1143])
def test_a_file_that_ends_early_is_not_read(length):
    assert len(written()) == 1144
    assert reads(written()[:length], header()) is None


def test_a_file_that_goes_on_is_not_read():
    assert reads(written() + b"\0", header()) is None


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_digest_for_each_full_page(page_size):
    text = tokens_of(range(3 * page_size))
    digests = page_digests("layout", NO_KEY, text, page_size)
    assert len(set(digests)) == len(digests) == 3
    assert {len(digest) for digest in digests} == {32}
    assert page_digests("layout", NO_KEY, text[: 3 * page_size - 1], page_size) == digests[:2]
    assert page_digests("layout", NO_KEY, text[:0], page_size) == []


def test_a_digest_names_all_tokens_before_it():
    text = tokens_of(range(12))
    digests = page_digests("layout", NO_KEY, text, 4)
    for position in range(12):
        other = text.copy()
        other[position] += 1
        changed = page_digests("layout", NO_KEY, other, 4)
        same = [a == b for a, b in zip(digests, changed, strict=True)]
        assert same == [page < position // 4 for page in range(3)]


def test_layouts_and_extra_keys_never_share_a_digest():
    text = tokens_of(range(4))
    names = [("a", "b"), ("ab", ""), ("", "ab"), ("a", ""), ("", "a"), ("1 a", "b"), ("b", "a")]
    digests = [page_digests(layout, ExtraKey(extra), text, 4)[0] for layout, extra in names]
    assert len(set(digests)) == len(names)


def test_digests_do_not_depend_on_the_arrays_memory():
    text = tokens_of(range(16))
    spread = np.repeat(text, 2)[::2]
    assert not spread.flags.c_contiguous
    wide = text.astype(np.int64)
    expected = page_digests("layout", NO_KEY, text, 4)
    assert page_digests("layout", NO_KEY, spread, 4) == expected
    assert page_digests("layout", NO_KEY, wide, 4) == expected
