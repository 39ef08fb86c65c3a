"""The served model's tokenizer as smg fetches it: a zip, in pieces."""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import common_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CHUNK_BYTES = 64 * 1024

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
"""Files of a Hugging Face directory that make a tokenizer, and those that say when to stop."""


def tokenizer_archive(directory: Path) -> bytes:
    """A zip of the files above that are there; always the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _NAMES:
            file = directory / name
            if file.is_file():
                # Not `write`: that would put the file's time into the archive.
                entry = zipfile.ZipInfo(name)
                archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def tokenizer_chunks(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """The archive in order; the last piece has its SHA-256 in hexadecimal digits."""
    for start in range(0, len(archive), _CHUNK_BYTES):
        piece = common_pb2.GetTokenizerChunk(data=archive[start : start + _CHUNK_BYTES])
        if start + _CHUNK_BYTES >= len(archive):
            piece.sha256 = hashlib.sha256(archive).hexdigest()
        yield piece
