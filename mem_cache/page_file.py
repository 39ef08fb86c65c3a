"""One page of KV as a file: what names it, what is in it, and how both are checked.

| part | bytes | content |
|---|---|---|
| header | 96 | magic, version, lengths of tokens and payload, hash of the KV layout, digest |
| tokens | 4 per token | the page's own token ids, little-endian int32 |
| payload | as the header says | the page's K/V of all layers |
| checksum | 32 | SHA-256 of everything before it |

A reader knows what it wants, hence every byte before the payload: it compares, and never believes
a length that it read. Whatever differs makes the whole file worthless.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from io import BufferedReader, BufferedWriter

    from kvferry.ids import ExtraKey, TokenIds

MAGIC = b"kvferry\x00page\x00\x00\x00\x00"
VERSION = 1
DIGEST_BYTES = 32
CHECKSUM_BYTES = 32
_HEADER = struct.Struct("<16s I I Q 32s 32s")


def page_digests(
    page_hash: str, extra_key: ExtraKey, token_ids: TokenIds, page_size: int
) -> list[bytes]:
    """A 32-byte name for each full page: of the layout, the extra key and all tokens to its end.

    Equal names mean equal K/V, byte for byte. BLAKE2b-256 (RFC 7693), each over the name of the
    page before it and the page's tokens; the rest of the tokens that fills no page is ignored.
    """
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    step = 4 * page_size
    # The length keeps the two texts apart, whatever they contain.
    root = f"{len(page_hash)} {page_hash}{extra_key}".encode()
    previous = hashlib.blake2b(root, digest_size=DIGEST_BYTES, person=b"kvferry-page").digest()
    digests: list[bytes] = []
    for start in range(0, len(data) - step + 1, step):
        state = hashlib.blake2b(previous, digest_size=DIGEST_BYTES)
        state.update(data[start : start + step])
        previous = state.digest()
        digests.append(previous)
    return digests


def page_header(page_hash: str, digest: bytes, tokens: bytes, page_bytes: int) -> bytes:
    """Everything that a page's file holds before its payload."""
    layout = hashlib.blake2b(page_hash.encode(), digest_size=32).digest()
    fixed = _HEADER.pack(MAGIC, VERSION, len(tokens), page_bytes, layout, digest)
    return fixed + tokens


def file_bytes(header: bytes, page_bytes: int) -> int:
    """Length of a page's file."""
    return len(header) + page_bytes + CHECKSUM_BYTES


def write_page(file: BufferedWriter, header: bytes, page: memoryview) -> None:
    """Write header, payload and checksum."""
    file.write(header)
    file.write(page)
    file.write(_checksum(header, page))


def read_page(file: BufferedReader, header: bytes, out: memoryview) -> bool:
    """Read the payload into `out`; False if the file isn't exactly what `header` asks for.

    On False `out` may hold anything.
    """
    if file.read(len(header)) != header or file.readinto(out) != len(out):
        return False
    # One byte more than there should be tells a file that goes on.
    return file.read(CHECKSUM_BYTES + 1) == _checksum(header, out)


def _checksum(header: bytes, page: memoryview) -> bytes:
    # SHA-256 because processors have instructions for it: three times as fast as BLAKE2b.
    state = hashlib.sha256(header)
    state.update(page)
    return state.digest()
